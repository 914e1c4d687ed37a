package ledger

import (
	"net/http"
	"slices"
	"strconv"
	"sync"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/rows"
	"meridian.internal/shared/sse"
)

// Routes registers GET /iteration_stats and /kv_stats.
func (l *Ledger) Routes(e *echo.Echo) {
	e.GET("/iteration_stats", l.iterationStats)
	e.GET("/kv_stats", l.kvStats)
}

// iterationStats answers with the rows after a number, or follows them. It takes nothing away: any number of readers may
// each keep a cursor of its own. Without rows it says so at once.
func (l *Ledger) iterationStats(c echo.Context) error {
	after, err := api.Cursor(c.Request())
	if err != nil {
		return err
	}
	most := int64(l.kept())
	limit, err := api.QueryNumber(c.Request(), "limit", most)
	if err != nil {
		return err
	}
	if sse.Wanted(c.Request()) && l.ring != nil {
		sse.Follow(c.Request().Context(), c.Response(), after, sse.Feed{
			Read: func(after int64, limit int) ([][]byte, int64, int64) {
				p := l.ring.Read(after, limit)
				return p.Rows, p.Next, p.Dropped
			},
			Changed: l.ring.Changed, Closed: l.ring.Closed,
		})
		return nil
	}
	page := rows.Page{Next: after}
	if l.ring != nil {
		page = l.ring.Read(after, int(min(limit, most)))
	}
	b := pages.Get().(*[]byte)
	defer pages.Put(b)
	*b = l.page((*b)[:0], page)
	c.Response().Header().Set(echo.HeaderContentLength, strconv.Itoa(len(*b))) // no chunks: one write of all
	return c.JSONBlob(http.StatusOK, *b)
}

// pages are buffers for answers: a reader comes often, for a hundred KB each time.
var pages = sync.Pool{New: func() any { return new([]byte) }}

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
