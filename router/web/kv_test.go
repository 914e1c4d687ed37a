package web

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// nodes answers for the nodes of a test in place of a network.
type nodes struct {
	asked  atomic.Int64
	answer func(host string) (int, string)
}

func (n *nodes) RoundTrip(r *http.Request) (*http.Response, error) {
	n.asked.Add(1)
	w := httptest.NewRecorder()
	status, body := n.answer(r.URL.Host)
	if status == 0 {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	w.WriteHeader(status)
	w.WriteString(body)
	return w.Result(), nil
}

func TestNodesAreAskedWhileAPageFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &nodes{answer: func(host string) (int, string) {
			return map[string]int{"good": 200, "old": 404, "broken": 200, "endless": 200}[host],
				map[string]string{"good": `{"enabled":true}`, "broken": "no JSON", "endless": `"` + strings.Repeat("x", maxKV) + `"`}[host]
		}}
		k := NewKV(func() map[string]string {
			return map[string]string{"a": "http://good", "b": "http://old", "c": "http://broken", "d": "http://endless", "e": "http://silent"}
		}, &http.Client{Transport: n})
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		go k.Run(ctx)
		time.Sleep(10 * time.Second)
		if turn, _ := k.newest(); n.asked.Load() != 0 || turn != 0 {
			t.Fatalf("%d questions though nobody looks", n.asked.Load())
		}
		end := k.follow()
		time.Sleep(3*kvPause + kvTimeout)
		turn, answers := k.newest()
		if turn < 2 || len(answers) != 1 || string(answers["a"]) != `{"enabled":true}` {
			t.Errorf("round %d: %s, want the answer of a alone", turn, answers)
		}
		end()
		time.Sleep(kvPause + kvTimeout)
		before := n.asked.Load()
		time.Sleep(10 * kvPause)
		if got := n.asked.Load(); got != before {
			t.Errorf("%d questions after the last page has gone", got-before)
		}
	})
}
