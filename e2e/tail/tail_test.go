package tail

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"meridian.internal/e2e/client"
)

func at(base time.Time, ms ...int) []time.Time {
	var out []time.Time
	for _, m := range ms {
		out = append(out, base.Add(time.Duration(m)*time.Millisecond))
	}
	return out
}

func TestOnlyWhatLiesInTheWindowCounts(t *testing.T) {
	base := time.Now()
	from, to := base.Add(100*time.Millisecond), base.Add(200*time.Millisecond)
	w := Window{Time: 100 * time.Millisecond}
	// Began before and ended within: its gaps within count, its first token does not, it is a whole stream.
	w.see(&client.Result{Sent: base, Chunks: at(base, 50, 90, 110, 150), End: base.Add(151 * time.Millisecond)}, nil, from, to)
	// Begins within, ends after: first token and the gaps within.
	w.see(&client.Result{Sent: at(base, 120)[0], Chunks: at(base, 140, 190, 210), End: base.Add(211 * time.Millisecond)}, nil, from, to)
	w.see(&client.Result{Sent: base, End: base.Add(150 * time.Millisecond)}, nil, from, to) // said nothing
	// Broke off within: what came of it was seen, but it is no whole stream.
	w.see(&client.Result{Sent: base, Chunks: at(base, 50, 60), End: base.Add(150 * time.Millisecond)}, client.ErrNoEnd, from, to)
	if got := fmt.Sprint(w.ITL.values); got != "[20ms 40ms 50ms]" {
		t.Errorf("gaps %s", got)
	}
	if got := fmt.Sprint(w.TTFT.values); got != "[20ms]" {
		t.Errorf("first tokens %s", got)
	}
	if got := w.Goodput(40 * time.Millisecond); got != 40 {
		t.Errorf("%v tokens a second are good, want the 4 of the stream that ended, in 0.1 s", got)
	}
	if got := w.Goodput(39 * time.Millisecond); got != 0 {
		t.Errorf("%v tokens a second are good with a gap over the limit", got)
	}
}

func TestQuantilesAreExactAndAbsentWithoutValues(t *testing.T) {
	var s Sample
	for i := range 1000 {
		s.add(time.Duration(1000-i) * time.Millisecond)
	}
	if s.Quantile(0.5) != 500*time.Millisecond || s.Quantile(0.999) != 999*time.Millisecond || s.Quantile(1) != time.Second {
		t.Errorf("quantiles %v %v %v", s.Quantile(0.5), s.Quantile(0.999), s.Quantile(1))
	}
	if b, err := json.Marshal(Window{}); err != nil || !strings.Contains(string(b), `"itl":null`) {
		t.Errorf("%s, %v: want null without values", b, err)
	}
}

func TestTheRateOfLongPromptsLeavesRoomForTheStreams(t *testing.T) {
	s := Shape{Busy: 0.7}
	got, err := LongRate(s, 20, 10*time.Millisecond, 50*time.Millisecond) // 0.2 of the time is the streams' own
	if err != nil || got < 9.99 || got > 10.01 {
		t.Errorf("%v a second, %v, want 10", got, err)
	}
	if _, err := LongRate(s, 100, 10*time.Millisecond, 50*time.Millisecond); err == nil {
		t.Error("streams that fill the context node leave room")
	}
}

// gaps makes a window whose gaps are as told, with one stream of 100 tokens for each.
func gaps(mode string, all ...time.Duration) Window {
	w := Window{Mode: mode, Streams: 2, Time: time.Second}
	for _, g := range all {
		w.ITL.add(g)
		w.TTFT.add(time.Millisecond)
		w.ended = append(w.ended, stream{tokens: 100, p99: g})
	}
	return w
}

func TestTheTableSaysWhatIsMetAndWhatIsMissed(t *testing.T) {
	c := Comparison{
		Quiet:     map[string]Window{Disaggregated: gaps("", 10e6, 10e6), Aggregated: gaps("", 10e6, 10e6)},
		Disturbed: map[string]Window{Disaggregated: gaps("", 12e6, 12e6), Aggregated: gaps("", 15e6, 90e6)},
	}
	text := c.Table()
	for _, want := range []string{"disaggregated 1.20 (goal at most 1.3: met), aggregated 9.00", "over aggregated: 2.00 (goal at least 1.5: met)", "up to 20.00"} {
		if !strings.Contains(text, want) {
			t.Errorf("the table lacks %q:\n%s", want, text)
		}
	}
	c.Disturbed[Disaggregated] = gaps("", 14e6, 25e6)
	for _, want := range []string{"1.3: missed", "1.00 (goal at least 1.5: missed)"} {
		if text := c.Table(); !strings.Contains(text, want) {
			t.Errorf("the table lacks %q:\n%s", want, text)
		}
	}
}

func TestStreamsAndLongPromptsRunBesideEachOther(t *testing.T) {
	var long, repeated atomic.Int64
	var seen sync.Map // prompts
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct {
			Prompt    []int `json:"prompt"`
			MaxTokens int   `json:"max_tokens"`
		}
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		if _, again := seen.LoadOrStore(fmt.Sprint(body.Prompt), true); again {
			repeated.Add(1)
		}
		if len(body.Prompt) == 500 {
			long.Add(1)
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for range body.MaxTokens {
			fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n")
			w.(http.Flusher).Flush()
			time.Sleep(time.Millisecond)
		}
		fmt.Fprint(w, "data: [DONE]\n\n")
	}))
	defer s.Close()
	shape := Shape{Streams: 2, Prompt: 20, Out: 20, Long: 500, LongOut: 2, Busy: 0.5, Vocab: 100, Warm: 50 * time.Millisecond, Time: 2 * time.Second}
	if err := shape.Check(); err != nil {
		t.Fatal(err)
	}
	target := Target{URL: s.URL, Model: "m", Mode: Aggregated}
	if d, err := target.Alone(t.Context(), shape, 500); err != nil || d <= 0 {
		t.Fatalf("a prompt alone: %v, %v", d, err)
	}
	long.Store(0)
	w, err := target.Measure(t.Context(), shape, 50)
	if err != nil {
		t.Fatal(err)
	}
	if w.Failed != 0 || len(w.ITL.values) < 20 || len(w.ended) < 2 || len(w.LongTTFT.values) == 0 || long.Load() == 0 {
		t.Errorf("%d failed, %d gaps, %d streams, %d long prompts seen of %d", w.Failed, len(w.ITL.values), len(w.ended), len(w.LongTTFT.values), long.Load())
	}
	if q, err := target.Measure(t.Context(), shape, 0); err != nil || len(q.LongTTFT.values) != 0 {
		t.Errorf("undisturbed: %v, %d long prompts", err, len(q.LongTTFT.values))
	}
	if n := repeated.Load(); n != 0 {
		t.Errorf("%d prompts came before: a cache would know them", n)
	}
}
