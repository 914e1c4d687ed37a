package web

import (
	"encoding/json"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/sse"
)

const (
	maxFollowers  = 64
	followRows    = 500 // rows an event
	followPause   = 250 * time.Millisecond
	clusterPause  = time.Second
	followerWrite = 10 * time.Second // a reader that takes nothing for so long is cut
)

// live is GET /live: server-sent events for the page.
//
//	rows     [row…], the oldest first, each row once; its id is the number of the last, to be given back as after=N
//	lost     {"lost":N}: rows that were overwritten before this reader took them
//	cluster  what GET /cluster answers, once a second
//	kv       {"node":what its GET /kv_stats answers}, when it was asked anew
//	clocks   {"node":[[unix ms, offset ns, bound ns]…]}, once, at the begin
//	windows  [window…]: at the begin all, then once a second those that are new or have grown
type live struct {
	feed      *Feed
	kv        *KV
	cluster   func() any
	draining  func() bool
	followers atomic.Int64
}

func (h *live) serve(c echo.Context) error {
	after, err := afterParam(c)
	if err != nil {
		return err
	}
	if h.followers.Add(1) > maxFollowers {
		h.followers.Add(-1)
		return api.Unavailable("live", time.Second, "%d pages follow already, as many as this router serves", maxFollowers)
	}
	defer h.followers.Add(-1)
	defer h.kv.follow()()
	w := c.Response()
	w.Header().Set("Content-Type", sse.ContentType)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusOK)
	s := &follower{live: h, out: w, control: http.NewResponseController(w), after: after}
	ctx := c.Request().Context()
	tick := time.NewTicker(followPause)
	defer tick.Stop()
	for {
		if s.push(time.Now()) != nil || h.draining() {
			return nil // the reader has gone, or is to come back to another router
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// afterParam reads the number of the last row that the reader has; one that is newer than any is of another router's life.
func afterParam(c echo.Context) (int64, error) {
	v := c.QueryParam("after")
	if v == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 0 {
		return 0, api.Invalid("after", "after=%q: want the number of the last row that was seen", v)
	}
	return n, nil
}

// follower is one open page.
type follower struct {
	*live
	out     *echo.Response
	control *http.ResponseController
	after   int64
	begun   bool
	cluster time.Time // when it was last sent
	window  int64     // begin of the newest window sent, unix ms
	kvTurn  int64     // of the newest KV sent
	buf     []byte
}

// push sends what is new.
func (s *follower) push(now time.Time) error {
	s.buf = s.buf[:0]
	if now.Sub(s.cluster) >= clusterPause {
		if !s.begun { // first, so that the first nodes are drawn with their history
			s.event("clocks", 0, s.feed.clocksOver())
			if s.after > s.feed.newest() {
				s.after = 0
			}
		}
		s.event("cluster", 0, s.live.cluster())
		if w := s.feed.over(s.window - 1); len(w) > 0 {
			s.event("windows", 0, w)
			s.window = w[len(w)-1].AtMS
		}
		s.cluster, s.begun = now, true
	}
	if turn, nodes := s.kv.newest(); turn != s.kvTurn {
		s.event("kv", 0, nodes)
		s.kvTurn = turn
	}
	for {
		rows, lost := s.feed.since(s.after, followRows)
		if lost > 0 && s.after > 0 {
			s.event("lost", 0, map[string]int64{"lost": lost})
		}
		if len(rows) > 0 {
			s.after = rows[len(rows)-1].Seq
			s.event("rows", s.after, rows)
		}
		if len(s.buf) > 0 {
			if err := s.write(); err != nil {
				return err
			}
		}
		if len(rows) < followRows {
			return nil
		}
	}
}

func (s *follower) event(name string, id int64, data any) {
	b, err := json.Marshal(data)
	if err != nil {
		return // only fixed types come here
	}
	s.buf = append(append(append(s.buf, "event: "...), name...), '\n')
	if id > 0 {
		s.buf = append(strconv.AppendInt(append(s.buf, "id: "...), id, 10), '\n')
	}
	s.buf = sse.AppendEvent(s.buf, b)
}

func (s *follower) write() error {
	_ = s.control.SetWriteDeadline(time.Now().Add(followerWrite)) // not supported in tests without a connection
	if _, err := s.out.Write(s.buf); err != nil {
		return err
	}
	s.buf = s.buf[:0]
	return s.control.Flush()
}
