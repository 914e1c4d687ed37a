package summary

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"meridian.internal/shared/phase"
)

// noisy are n requests whose time to first token is around ttft.
func noisy(n int, ttft float64, seed uint64) *Summary {
	rng := rand.New(rand.NewPCG(seed, 7))
	s := New(0)
	for i := range n {
		v := int64(ttft * (1 + 0.2*rng.NormFloat64()))
		s.Add(line(fmt.Sprint(i), v, v+1_000_000))
	}
	return s
}

func TestOnlyAChangeThatIsNoChanceIsSure(t *testing.T) {
	cases := []struct {
		name string
		a, b *Summary
		sure bool
		sign int64
	}{
		{"the same distribution", noisy(500, 1e6, 1), noisy(500, 1e6, 2), false, 0},
		{"ten percent slower, many requests", noisy(2000, 1e6, 1), noisy(2000, 1.1e6, 2), true, 1},
		{"ten percent faster, many requests", noisy(2000, 1e6, 1), noisy(2000, 0.9e6, 2), true, -1},
		{"ten percent slower, five requests", noisy(5, 1e6, 1), noisy(5, 1.1e6, 2), false, 0},
	}
	for _, c := range cases {
		got := Diff(c.a, c.b)[0]
		if got.Sure != c.sure || c.sign*got.DeltaNS < 0 {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}

func TestTheSpanThatMovedComesFirst(t *testing.T) {
	a, b := noisy(300, 1e6, 1), noisy(300, 1e6, 1)
	for i := range 300 {
		l := line(fmt.Sprint(i), 1_000_000, 2_000_000)
		l.Spans = append(l.Spans, l.Spans[0])
		l.Spans[0].Name, l.Spans[0].DurNS = "kv_handover", 9_000_000
		b.Add(l)
	}
	list := Diff(a, b)
	if got := relative(2, 3) + "; " + relative(4, 1) + "; " + relative(3, 240); got != "+50.0 %; -75.0 %; × 80" {
		t.Errorf("changes are told as %s", got)
	}
	if list[3].Name != "kv_handover" || list[3].OnlySide != "b" {
		t.Errorf("%+v", list[3])
	}
	var w bytes.Buffer
	if err := WriteDiff(&w, list, false); err != nil || !strings.Contains(w.String(), "only in b") {
		t.Errorf("%v\n%s", err, w.String())
	}
}

func TestAdviceFollowsTheTimes(t *testing.T) {
	add := func(s *Summary, n int, style string, outcome phase.Outcome, spans map[string]int64) *Summary {
		for i := range n {
			l := line(fmt.Sprint(i), 10_000_000, 50_000_000)
			l.Style, l.Outcome, l.Spans = style, outcome, l.Spans[:0]
			for name, ns := range spans {
				l.Spans = append(l.Spans, span(name, ns))
			}
			s.Add(l)
		}
		return s
	}
	with := func(spans map[string]int64) *Summary {
		return add(New(0), 40, "generation_first", phase.Finished, spans)
	}
	aggregated := func(s *Summary) *Summary {
		return add(s, 4000, "aggregated", phase.Finished, map[string]int64{"queue": 8e6, "prefill": 1e6, "decode": 40e6})
	}
	failed := add(New(0), 40, "generation_first", phase.Failed, nil)
	bimodal := add(with(map[string]int64{"kv_handover": 9e6}), 60, "generation_first", phase.Finished, map[string]int64{"kv_handover": 0, "prefill": 9e6})
	merged := New(0)
	merged.Merge(with(map[string]int64{"ctx_queue": 5e6}))
	cases := []struct {
		name     string
		s        *Summary
		question int
		want     string
	}{
		{"too few requests", New(0), 0, "Cannot tell"},
		{"a dear pair and no prefill to keep away", with(map[string]int64{"kv_handover": 9e6, "decode": 1e6}), 0, "Probably"},
		{"a cheap pair that keeps much prefill away", with(map[string]int64{"kv_handover": 1e5, "decode": 40e6, "prefill": 8e6}), 0, "No, under load"},
		{"waiting for prefill", with(map[string]int64{"ctx_queue": 5e6, "gen_admit": 1e5}), 1, "Prefill"},
		{"waiting for decode", with(map[string]int64{"ctx_queue": 1e5, "gen_admit": 5e6, "decode": 40e6}), 1, "Decode"},
		{"waiting for both", with(map[string]int64{"ctx_queue": 4e6, "gen_admit": 5e6, "decode": 40e6}), 1, "Both"},
		{"places at decode that are held for prefill", with(map[string]int64{"ctx_queue": 4e6, "prefill": 1e6, "gen_admit": 4e6, "decode": 1e5}), 1, "Prefill"},
		{"places at decode that decode holds, beside a busy prefill", with(map[string]int64{"ctx_queue": 1e6, "prefill": 1e6, "gen_admit": 4e6, "decode": 40e6}), 1, "Decode"},
		{"a wait that one node would have too", with(map[string]int64{"gen_admit": 9e6, "kv_handover": 1e5, "decode": 40e6, "prefill": 8e6}), 0, "No, under load"},
		{"waiting for neither", with(map[string]int64{"ctx_queue": 1e5}), 1, "Neither"},
		{"of requests that failed", failed, 0, "Cannot tell"},
		{"of requests that failed", failed, 1, "Cannot tell"},
		{"of requests that one node served", aggregated(New(0)), 0, "Cannot tell"},
		{"which side, where one node does both", aggregated(New(0)), 1, "Cannot tell"},
		{"a dear pair among many requests that one node served", aggregated(with(map[string]int64{"kv_handover": 9e6, "decode": 1e6})), 0, "Probably"},
		{"of nodes that do not tell", with(map[string]int64{"remote": 9e6, "decode": 40e6}), 0, "Cannot tell"},
		{"waiting where nodes do not tell", with(map[string]int64{"gen_leg": 1e6, "remote": 9e6}), 1, "Cannot tell"},
		{"waiting at the door", with(map[string]int64{"router_queue": 8e6, "ctx_queue": 1e6}), 1, "Cannot tell which"},
		{"waiting for a lease of KV at the context node", with(map[string]int64{"ctx_admit": 5e6}), 1, "Prefill"},
		{"waiting, in parts of files", merged, 1, "Prefill"},
		{"a slow hand-over", with(map[string]int64{"kv_handover": 3e6}), 2, "Yes"},
		{"a hand-over that is slow for two of five", bimodal, 2, "Yes"},
		{"a slow hand-over among many requests that one node served", aggregated(with(map[string]int64{"kv_handover": 3e6})), 2, "Yes"},
		{"a hidden hand-over", with(map[string]int64{"kv_handover": 1e5}), 2, "No"},
	}
	for _, c := range cases {
		list := c.s.Advise()
		if got := list[c.question].Answer; !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
		var w bytes.Buffer
		if err := WriteAdvice(&w, list, true); err != nil || w.Len() == 0 {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestChanceIsSeldomSure(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 9))
	for _, n := range []int{1, 2, 3, 5, 6, 8, 12, 40, 200} {
		const tries = 2000
		sure, covered := 0, 0
		for range tries {
			var a, b histogram
			for range n {
				a.add(int64(1e6 * (1 + rng.ExpFloat64())))
				b.add(int64(1e6 * (1 + rng.ExpFloat64())))
			}
			c := change("", &a, &b)
			if c.Sure {
				sure++
			}
			if median := int64(math.Round(1e6 * (1 + math.Ln2))); c.A.LoNS <= median && median <= c.A.HiNS {
				covered++
			}
		}
		if sure > tries*5/100 {
			t.Errorf("of %d pairs of the same distribution, %d values each, %d are a sure change", tries, n, sure)
		}
		if n > 5 && covered < tries*92/100 { // ranks are whole numbers
			t.Errorf("the interval of %d values holds the median in %d of %d cases", n, covered, tries)
		}
	}
}
