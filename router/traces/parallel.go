package traces

import (
	"context"
	"sync"

	"golang.org/x/sync/errgroup"

	"meridian.internal/router/timeline"
)

// batchBytes is how much text goes to a worker at a time.
const batchBytes = 256 << 10

// batch is some lines: ends are where each ends in text.
type batch struct {
	text []byte
	ends []int
	at   []Position
}

// Spread calls the functions of workers with every line, without phases, each line by one of them and in no order. A
// worker's calls do not overlap.
func (s *Set) Spread(ctx context.Context, workers []func(*timeline.Line)) error {
	if err := s.loadAmends(); err != nil {
		return err
	}
	var mu sync.Mutex // guards Bad
	report := func(at Position, err error) {
		mu.Lock()
		defer mu.Unlock()
		s.bad(at, err)
	}
	g, ctx := errgroup.WithContext(ctx)
	full, free := make(chan *batch, len(workers)), make(chan *batch, 2*len(workers))
	for range cap(free) {
		free <- &batch{}
	}
	for _, f := range workers {
		g.Go(func() error {
			for b := range full {
				s.handle(b, f, report)
				b.text, b.ends, b.at = b.text[:0], b.ends[:0], b.at[:0]
				free <- b
			}
			return nil
		})
	}
	g.Go(func() error {
		defer close(full)
		b := <-free
		err := s.Raw(ctx, func(line []byte, at Position) error {
			b.text = append(b.text, line...)
			b.ends, b.at = append(b.ends, len(b.text)), append(b.at, at)
			if len(b.text) >= batchBytes {
				full <- b
				b = <-free
			}
			return nil
		})
		full <- b
		return err
	})
	return g.Wait()
}

func (s *Set) handle(b *batch, f func(*timeline.Line), report func(Position, error)) {
	from := 0
	for i, end := range b.ends {
		l, err := timeline.ParseSpans(b.text[from:end])
		from = end
		if err != nil {
			report(b.at[i], err)
			continue
		}
		if a := s.amended[l.RequestID]; a != nil {
			if better, err := timeline.ParseSpans(a); err == nil {
				l = better
			}
		}
		f(l)
	}
}
