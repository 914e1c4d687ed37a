package serve

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	limitedEvery = time.Minute
	// limitedSources bounds the sources that are told apart: names and addresses are the strangers' to choose.
	limitedSources = 256
	limitedName    = 128 // bytes of a source's name
)

// Limited is a logger for what others can make a process write, by a malformed message or connection. Of lines with one message and one source,
// the value of the first field, it writes one a minute; the next says how many were left_out. name is that of the counter of all of them.
func Limited(log *slog.Logger, r prometheus.Registerer, name string) (*slog.Logger, error) {
	lines := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: name, Help: "Log lines that others can cause: of a message about a source one a minute is written.",
	}, []string{"message", "written"})
	if err := r.Register(lines); err != nil {
		return nil, fmt.Errorf("register metrics of the log: %w", err)
	}
	return slog.New(limited{log.Handler(), &sources{lines: lines, of: map[string]*source{}}}), nil
}

// limited is the handler of such a logger.
type limited struct {
	slog.Handler
	sources *sources
}

func (l limited) Handle(ctx context.Context, r slog.Record) error {
	name := ""
	r.Attrs(func(a slog.Attr) bool {
		name = a.Value.String()
		return false
	})
	write, leftOut := l.sources.take(r.Message, name, r.Time)
	if !write {
		return nil
	}
	if leftOut > 0 {
		r.AddAttrs(slog.Int("left_out", leftOut))
	}
	return l.Handler.Handle(ctx, r)
}

func (l limited) WithAttrs(attrs []slog.Attr) slog.Handler {
	return limited{l.Handler.WithAttrs(attrs), l.sources}
}

func (l limited) WithGroup(name string) slog.Handler {
	return limited{l.Handler.WithGroup(name), l.sources}
}

// sources are those of whom lines were written lately.
type sources struct {
	lines *prometheus.CounterVec

	mu sync.Mutex // guards of
	of map[string]*source
}

type source struct {
	at      time.Time // of the last line
	leftOut int       // since
}

// take tells whether a line is written, and how many before it were not.
func (s *sources) take(message, name string, at time.Time) (write bool, leftOut int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.lines.WithLabelValues(message, strconv.FormatBool(write)).Inc() }()
	e := s.find(message, name, at)
	if !e.at.IsZero() && at.Sub(e.at) < limitedEvery {
		e.leftOut++
		return false, 0
	}
	leftOut = e.leftOut
	*e = source{at: at}
	return true, leftOut
}

// find gives the entry of a source; those that there is no room for have one together.
func (s *sources) find(message, name string, at time.Time) *source {
	key := message + "\x00" + name[:min(len(name), limitedName)]
	if e := s.of[key]; e != nil {
		return e
	}
	if len(s.of) >= limitedSources {
		for k, e := range s.of {
			if at.Sub(e.at) >= limitedEvery {
				delete(s.of, k)
			}
		}
	}
	if len(s.of) >= limitedSources {
		key = message
	}
	e := s.of[key]
	if e == nil {
		e = &source{}
		s.of[key] = e
	}
	return e
}
