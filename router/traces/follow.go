package traces

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
)

// Follow calls f with every line that is appended to a folder's files from now on, in the order of each file, until ctx
// ends. every is how often it looks.
func Follow(ctx context.Context, dir string, every time.Duration, f func(*timeline.Line) error) error {
	w := &follower{dir: dir, at: map[string]int64{}}
	if err := w.look(nil); err != nil {
		return err
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if err := w.look(f); err != nil {
				return err
			}
		}
	}
}

// follower knows how far each file was read.
type follower struct {
	dir string
	at  map[string]int64
}

// look reads what is new; without f it only remembers where the files end.
func (w *follower) look(f func(*timeline.Line) error) error {
	names, err := jsonl.Glob(w.dir, "timeline-*"+lineSuffix)
	if err != nil {
		return fmt.Errorf("list %s: %w", w.dir, err)
	}
	for _, n := range names {
		info, err := os.Stat(n)
		if err != nil || info.Size() <= w.at[n] {
			continue
		}
		if f == nil {
			w.at[n] = info.Size()
			continue
		}
		if err := w.read(n, f); err != nil {
			return err
		}
	}
	return nil
}

func (w *follower) read(name string, f func(*timeline.Line) error) error {
	file, err := os.Open(name)
	if err != nil {
		return nil // rotated away
	}
	defer file.Close()
	if _, err := file.Seek(w.at[name], io.SeekStart); err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	from := w.at[name]
	return jsonl.ReadFrom(file, func(b []byte, _ int, offset int64) error {
		w.at[name] = from + offset + int64(len(b)) + 1
		l, err := timeline.Parse(b)
		if err != nil {
			return nil
		}
		return f(l)
	}, func(int, error) {})
}
