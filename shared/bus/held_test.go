package bus

import (
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestAHeldRecordTravelsOnlyIfNobodyAcknowledgedIt(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		p, err := newPublisher(PublisherOptions{SpoolDir: dir, Hold: time.Second, Logger: quiet})
		if err != nil {
			t.Fatal(err)
		}
		f := &fake{open: true}
		p.send = f.send
		p.start()
		sent := func() int {
			f.mu.Lock()
			defer f.mu.Unlock()
			return len(f.got)
		}
		var late Held
		for i := range 10 {
			h, err := p.PublishHeld(aRecord("q"))
			if err != nil {
				t.Fatal(err)
			}
			switch {
			case i == 4:
				late = h
			case i%2 == 0:
				_ = h.Ack()
			}
		}
		if time.Sleep(900 * time.Millisecond); sent() != 0 {
			t.Errorf("%d records were sent before their time", sent())
		}
		if time.Sleep(2 * time.Second); sent() != 6 {
			t.Errorf("%d records were sent, want the 6 that nobody acknowledged", sent())
		}
		_ = late.Ack() // after it was sent
		if n := len(p.held.list); n != 0 {
			t.Errorf("%d records are remembered in vain", n)
		}
		if s := p.Stats(); s.Emitted != 10 || s.Stored != 10 || s.Pending != 0 {
			t.Errorf("stats %+v", s)
		}
		// One that is young when the publisher closes does not wait.
		if _, err := p.PublishHeld(aRecord("q")); err != nil {
			t.Fatal(err)
		}
		before := time.Now()
		if err := p.Close(t.Context()); err != nil || sent() != 7 {
			t.Errorf("close: %v, %d sent", err, sent())
		}
		if took := time.Since(before); took >= time.Second {
			t.Errorf("closing took %v", took)
		}
	})
}

// What is acknowledged is passed over, in whatever order the acknowledgements come; what is not, and what was never held,
// is sent, also across segments.
func TestOnlyWhatNobodyAcknowledgedIsSent(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		p, err := newPublisher(PublisherOptions{SpoolDir: dir, Hold: time.Second, MaxBytes: 40_000, Logger: quiet}) // a segment holds some 30
		if err != nil {
			t.Fatal(err)
		}
		f := &fake{open: true}
		p.send = f.send
		p.start()
		var kept []string
		for round := range 8 {
			var list []Held
			for i := range 20 {
				if round%2 == 1 && i == 13 {
					publish(t, p, "never held")
					kept = append(kept, strconv.FormatInt(p.seq.Load(), 10))
				}
				h, err := p.PublishHeld(aRecord("q"))
				if err != nil {
					t.Fatal(err)
				}
				list = append(list, h)
				if round%2 == 1 && i == 7 {
					kept = append(kept, strconv.FormatInt(p.seq.Load(), 10))
				}
			}
			for i, h := range slices.Backward(list) {
				if round%2 == 0 || i != 7 {
					_ = h.Ack()
				}
			}
			time.Sleep(3 * time.Second)
			synctest.Wait()
			if len(p.held.list) != 0 || p.Stats().Pending != 0 {
				t.Fatalf("round %d: %d records wait, stats %+v", round, len(p.held.list), p.Stats())
			}
		}
		var got []string
		for _, id := range f.got {
			got = append(got, id[strings.LastIndexByte(id, '.')+1:])
		}
		if !slices.Equal(got, kept) {
			t.Errorf("sent %v, want %v", got, kept)
		}
		if err := p.Close(t.Context()); err != nil {
			t.Error(err)
		}
	})
}
