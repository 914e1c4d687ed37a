package sse

import (
	"context"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"
)

func TestFollowTellsWhatIsLostAndEndsWithItsFeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, changed := time.Now(), make(chan struct{})
		late := func() bool { return time.Since(start) >= time.Minute }
		f := Feed{
			Read: func(after int64, limit int) (out [][]byte, next, dropped int64) {
				if after == 0 {
					after, dropped = 2, 2
				}
				items := int64(4)
				if late() {
					items = 5
				}
				for ; after < items && len(out) < limit; after++ {
					out = append(out, []byte{byte('a' + after)})
				}
				return out, after, dropped
			},
			Changed: func(int64) <-chan struct{} { return changed },
			Closed:  late,
		}
		w := httptest.NewRecorder()
		time.AfterFunc(time.Minute, func() { close(changed) })
		Follow(t.Context(), w, 0, f)
		want := "event: dropped\ndata: {\"dropped\":2}\n\nid: 3\ndata: c\n\nid: 4\ndata: d\n\n" +
			": alive\n\n: alive\n\n: alive\n\n" + "id: 5\ndata: e\n\n"
		if got := w.Body.String(); got != want {
			t.Errorf("stream %q\nwant   %q", got, want)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		f.Closed, f.Changed = func() bool { return false }, func(int64) <-chan struct{} { return nil }
		Follow(ctx, httptest.NewRecorder(), 5, f) // returns
	})
}
