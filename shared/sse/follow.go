package sse

import (
	"context"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Feed is a numbered sequence that grows, and of which the oldest may be lost.
type Feed struct {
	Read    func(after int64, limit int) (items [][]byte, next, dropped int64) // next: number of the last item, or the reader's own
	Changed func(after int64) <-chan struct{}                                  // closed when there is something after the number, or the feed is closed
	Closed  func() bool                                                        // nothing more comes
}

const (
	followBatch = 64
	followPause = 20 * time.Millisecond // items come by the hundred a second: they travel together
	followAlive = 15 * time.Second
)

// Wanted tells whether a client asks for a stream of events.
func Wanted(r *http.Request) bool { return strings.Contains(r.Header.Get("Accept"), ContentType) }

// Follow streams a feed as events, each with its number as id, until the client goes or the feed is closed. What the feed has lost
// meanwhile is told in an event of its own, named "dropped".
func Follow(ctx context.Context, w http.ResponseWriter, after int64, f Feed) {
	w.Header().Set("Content-Type", ContentType)
	w.Header().Set("Cache-Control", "no-cache")
	w.WriteHeader(http.StatusOK)
	flusher := http.NewResponseController(w)
	flush := func() error { return flusher.Flush() }
	if flush() != nil {
		return
	}
	timer := time.NewTimer(followAlive)
	defer timer.Stop()
	for {
		ended := f.Closed()
		items, next, dropped := f.Read(after, followBatch)
		after = next
		if len(items) > 0 {
			if _, err := w.Write(appendItems(nil, items, next, dropped)); err != nil || flush() != nil {
				return // the reader has gone
			}
		} else if ended {
			return
		}
		wait, changed := followAlive, f.Changed(after)
		if len(items) > 0 {
			wait, changed = followPause, nil
		}
		timer.Reset(wait)
		select {
		case <-changed:
		case <-ctx.Done():
			return
		case <-timer.C:
			if wait == followAlive {
				if _, err := w.Write([]byte(": alive\n\n")); err != nil || flush() != nil {
					return
				}
			}
		}
	}
}

func appendItems(b []byte, items [][]byte, next, dropped int64) []byte {
	if dropped > 0 {
		b = append(b, "event: dropped\ndata: {\"dropped\":"...)
		b = append(strconv.AppendInt(b, dropped, 10), "}\n\n"...)
	}
	first := next - int64(len(items)) + 1
	for i, item := range items {
		b = append(strconv.AppendInt(append(b, "id: "...), first+int64(i), 10), "\ndata: "...)
		b = append(append(b, item...), "\n\n"...)
	}
	return b
}
