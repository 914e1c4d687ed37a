package ledger

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/rows"
)

// Routes registers GET /iteration_stats.
func (l *Ledger) Routes(e *echo.Echo) { e.GET("/iteration_stats", l.iterationStats) }

// iterationStats answers with the rows after a number, or follows them. It takes nothing away: any number of readers may
// each keep a cursor of its own. Without rows it says so at once.
func (l *Ledger) iterationStats(c echo.Context) error {
	after, err := number(c, "after", 0)
	if err != nil {
		return err
	}
	limit, err := number(c, "limit", int64(max(l.o.Keep, 1)))
	if err != nil {
		return err
	}
	if strings.Contains(c.Request().Header.Get("Accept"), "text/event-stream") && l.ring != nil {
		if id := c.Request().Header.Get("Last-Event-ID"); id != "" && c.QueryParam("after") == "" {
			if after, err = parse("Last-Event-ID", id); err != nil {
				return err
			}
		}
		return l.follow(c, after)
	}
	page := rows.Page{Next: after}
	if l.ring != nil {
		page = l.ring.Read(after, int(min(limit, int64(l.o.Keep))))
	}
	b := pages.Get().(*[]byte)
	defer pages.Put(b)
	*b = l.page((*b)[:0], page)
	c.Response().Header().Set(echo.HeaderContentLength, strconv.Itoa(len(*b))) // no chunks: one write of all
	return c.JSONBlob(http.StatusOK, *b)
}

// pages are buffers for answers: a reader comes often, for a hundred KB each time.
var pages = sync.Pool{New: func() any { return new([]byte) }}

func number(c echo.Context, name string, otherwise int64) (int64, error) {
	v := c.QueryParam(name)
	if v == "" {
		return otherwise, nil
	}
	return parse(name, v)
}

func parse(name, v string) (int64, error) {
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 0 {
		return 0, api.Invalid(name, "%s=%q: want a whole number of 0 or more", name, v)
	}
	return n, nil
}

func (l *Ledger) page(b []byte, p rows.Page) []byte {
	size := 128
	for _, r := range p.Rows {
		size += len(r) + 1
	}
	w := jsonline.Writer{B: slices.Grow(b, size)}
	w.Open('{')
	w.Bool("enabled", l.ring != nil)
	w.OpenKey("rows", '[')
	for i, r := range p.Rows {
		if i > 0 {
			w.B = append(w.B, ',')
		}
		w.B = append(w.B, r...)
	}
	w.Close(']')
	w.Int("next", p.Next)
	w.Int("oldest", p.Oldest)
	w.Int("newest", p.Last)
	w.Int("dropped", p.Dropped)
	if l.ring != nil {
		w.Str("clock_id", l.ring.Static().ClockID)
	}
	w.Close('}')
	return w.B
}

const (
	followBatch = 64
	followPause = 20 * time.Millisecond // rows come by the hundred a second: they travel together
	followAlive = 15 * time.Second
)

// follow streams rows as events, each with its number as id, until the client goes or the node drains. What the ring has
// lost meanwhile is told in an event of its own.
func (l *Ledger) follow(c echo.Context, after int64) error {
	w := c.Response()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-cache")
	w.WriteHeader(http.StatusOK)
	w.Flush()
	ctx := c.Request().Context()
	timer := time.NewTimer(followAlive)
	defer timer.Stop()
	for {
		ended := l.ring.Closed()
		p := l.ring.Read(after, followBatch)
		after = p.Next
		if len(p.Rows) > 0 {
			if _, err := w.Write(appendEvents(nil, p)); err != nil {
				return nil // the reader has gone
			}
			w.Flush()
		} else if ended {
			return nil
		}
		wait, changed := followAlive, l.ring.Changed(after)
		if len(p.Rows) > 0 {
			wait, changed = followPause, nil
		}
		timer.Reset(wait)
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		case <-timer.C:
			if wait == followAlive {
				if _, err := w.Write([]byte(": alive\n\n")); err != nil {
					return nil
				}
				w.Flush()
			}
		}
	}
}

func appendEvents(b []byte, p rows.Page) []byte {
	if p.Dropped > 0 {
		b = append(b, `event: dropped`+"\n"+`data: {"dropped":`...)
		b = append(strconv.AppendInt(b, p.Dropped, 10), "}\n\n"...)
	}
	first := p.Next - int64(len(p.Rows)) + 1
	for i, r := range p.Rows {
		b = append(strconv.AppendInt(append(b, "id: "...), first+int64(i), 10), "\ndata: "...)
		b = append(append(b, r...), "\n\n"...)
	}
	return b
}
