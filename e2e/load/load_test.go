package load

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/e2e/client"
)

func TestPercentilesAreWithinOnePercent(t *testing.T) {
	var h Histogram
	if s := h.Stats(); s.P50 != nil || s.Count != 0 {
		t.Errorf("empty: %+v", s)
	}
	for i := int64(1); i <= 1000; i++ {
		h.Add(i * 1000)
	}
	s := h.Stats()
	for name, c := range map[string]struct{ got, want int64 }{
		"p50": {*s.P50, 500_000}, "p90": {*s.P90, 900_000}, "p99": {*s.P99, 990_000}, "mean": {*s.Mean, 500_500},
		"min": {*s.Min, 1000}, "max": {*s.Max, 1_000_000},
	} {
		if d := float64(c.got-c.want) / float64(c.want); d > 0.01 || d < -0.01 {
			t.Errorf("%s = %d, want %d", name, c.got, c.want)
		}
	}
}

func TestZeroAndNegativeDurationsAreCounted(t *testing.T) {
	var h Histogram
	h.Add(0)
	h.Add(-5)
	if s := h.Stats(); s.Count != 2 || *s.P99 != 0 {
		t.Errorf("%+v", s)
	}
}

func TestDist(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for text, want := range map[string][2]int{"64": {64, 64}, "uniform:3:5": {3, 5}, "lognormal:100:0.5": {1, 2000}} {
		d, err := ParseDist(text)
		if err != nil {
			t.Fatal(err)
		}
		for range 1000 {
			if v := d.Draw(r); v < want[0] || v > want[1] {
				t.Fatalf("%s drew %d", text, v)
			}
		}
	}
	for _, bad := range []string{"", "0", "-1", "x", "uniform:5:3", "uniform:5", "lognormal:1:2:3", "normal:1:2", "NaN", "1e9", "const:"} {
		if _, err := ParseDist(bad); err == nil || !strings.Contains(err.Error(), "uniform:MIN:MAX") {
			t.Errorf("%q: error %v", bad, err)
		}
	}
}

func FuzzParseDist(f *testing.F) {
	for _, s := range []string{"64", "uniform:1:2", "lognormal:1:0.5", "uniform:1:1e300"} {
		f.Add(s)
	}
	r := rand.New(rand.NewPCG(1, 2))
	f.Fuzz(func(t *testing.T, s string) {
		if d, err := ParseDist(s); err == nil {
			if v := d.Draw(r); v < 1 || v > maxLength {
				t.Errorf("%q drew %d", s, v)
			}
		}
	})
}

func plan(t *testing.T, url string) Plan {
	t.Helper()
	d, err := ParseDist("uniform:4:8")
	if err != nil {
		t.Fatal(err)
	}
	return Plan{URL: url, Requests: 40, Concurrency: 4, Prompt: d, Output: d, Prefix: 3, Vocab: 100, Stream: true, Seed: 7}
}

func TestTheSameSeedMakesTheSameRequests(t *testing.T) {
	a, b := newMaker(plan(t, "")), newMaker(plan(t, ""))
	var prefix []int
	for range 20 {
		x, y := a.next(), b.next()
		if !reflect.DeepEqual(x, y) {
			t.Fatalf("%v and %v", x.Fields, y.Fields)
		}
		ids := x.Fields["prompt"].([]int)
		if prefix == nil {
			prefix = ids[:3]
		}
		if len(ids) < 4 || len(ids) > 8 || !reflect.DeepEqual(ids[:3], prefix) {
			t.Errorf("prompt %v, want 4 to 8 ids that begin with %v", ids, prefix)
		}
	}
}

func TestClosedLoopHoldsItsConcurrencyAndCountsErrors(t *testing.T) {
	var now, most, n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		most.Store(max(most.Load(), now.Add(1)))
		defer now.Add(-1)
		if n.Add(1)%4 == 0 {
			http.Error(w, `{"error":{"message":"no","stage":"place"}}`, http.StatusServiceUnavailable)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\"}],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n")
	}))
	defer s.Close()
	sum, err := Run(t.Context(), plan(t, s.URL), io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if most.Load() > 4 || sum.Requests != 40 || sum.OK != 30 || sum.Errors["status_503_place"] != 10 || sum.OutputTokens != 60 {
		t.Errorf("at most %d at a time, %+v", most.Load(), sum)
	}
	if sum.TTFT.Count != 30 || sum.ITL.Count != 30 || sum.TPOT.Count != 30 || sum.E2E.Count != 30 {
		t.Errorf("counts %+v", sum)
	}
}

func TestOpenLoopShedsWhatExceedsItsLimit(t *testing.T) {
	hold := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // the server sees that a client is gone only once the body is read
		select {
		case <-hold:
		case <-r.Context().Done():
		}
	}))
	defer s.Close()
	defer close(hold)
	p := plan(t, s.URL)
	p.Rate, p.Concurrency, p.Requests = 1e5, 2, 20
	p.Timeout = 5 * time.Second // longer than requests come, whoever waits for a processor
	sum, err := Run(t.Context(), p, nil)
	if err != nil || sum.Shed != 18 || sum.Requests != 2 || sum.Errors["timeout"] != 2 {
		t.Errorf("%+v, %v", sum, err)
	}
}

func TestArrivalsKeepTheirRateWhateverSendingCosts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := Plan{Rate: 1000, Vocab: 100, Seed: 1}
		m, twin, start := newMaker(p), newMaker(p), time.Now()
		for i := range 1000 {
			before, due := time.Now(), start.Add(twin.arrival())
			if !p.admit(t.Context(), start, m, nil) {
				t.Fatal("no arrival")
			}
			if late := time.Since(due); late > max(0, before.Sub(due)) {
				t.Fatalf("arrival %d is %v late", i, late)
			}
			time.Sleep(300 * time.Microsecond) // what a request costs the sender
		}
		if got := twin.arrived; got < 900*time.Millisecond || got > 1100*time.Millisecond {
			t.Errorf("1000 arrivals take %v, want about 1 s", got)
		}
	})
}

func TestNoRequestBeginsAfterTheDuration(t *testing.T) {
	for name, rate := range map[string]float64{"a closed loop whose place is free too late": 0, "an open loop whose next arrival is too late": 0.01} {
		synctest.Test(t, func(t *testing.T) {
			p := plan(t, "http://[") // no request reaches the network: time is the test's own
			p.Requests, p.Duration, p.Concurrency, p.Rate = 0, time.Second, 1, rate
			p.Each = func(*client.Result, error) { time.Sleep(p.Duration + 1) }
			sum, err := Run(t.Context(), p, nil)
			if err != nil || sum.Requests > 1 || rate > 0 && (sum.Requests > 0 || sum.DurationNS != p.Duration.Nanoseconds()) {
				t.Errorf("%s: %+v, %v", name, sum, err)
			}
		})
	}
}

func TestPlansWithoutEndAreRefused(t *testing.T) {
	for name, change := range map[string]func(*Plan){
		"no end": func(p *Plan) { p.Requests = 0 }, "fewer than none": func(p *Plan) { p.Requests, p.Duration = -5, time.Millisecond },
		"no time": func(p *Plan) { p.Duration = -time.Second }, "no concurrency": func(p *Plan) { p.Concurrency = 0 },
		"negative rate": func(p *Plan) { p.Rate = -1 }, "small vocabulary": func(p *Plan) { p.Vocab = 3 },
	} {
		p := plan(t, "")
		change(&p)
		if _, err := Run(t.Context(), p, nil); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestKindsOfErrors(t *testing.T) {
	for want, err := range map[string]error{
		"status_400_parse": &client.StatusError{Status: 400, Stage: "parse"}, "stream_error_gen": &client.StatusError{Stage: "gen"},
		"truncated": client.ErrNoEnd, "cancelled": context.Canceled, "timeout": context.DeadlineExceeded, "other": errors.New("x"),
	} {
		if got := Kind(err); got != want {
			t.Errorf("Kind(%v) = %q, want %q", err, got, want)
		}
	}
}

func TestChatsThatAreInterruptedAreSummedUp(t *testing.T) {
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	var n atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if n.Add(1) == 3 {
			interrupt()
			<-r.Context().Done()
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":{\"prompt_tokens\":4,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n")
	}))
	defer s.Close()
	sum, err := Chat(ctx, Chats{URL: s.URL, Conversations: 50, Turns: 2, Concurrency: 1, Words: 1, Output: Constant(2)})
	if err != nil || sum.OK != 2 || sum.Requests != 3 || sum.Errors["cancelled"] != 1 {
		t.Errorf("%+v, %v, want 2 turns that went well and the one that was cancelled", sum, err)
	}
}
