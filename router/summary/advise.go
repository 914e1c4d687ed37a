package summary

import (
	"bufio"
	"fmt"
	"io"

	"meridian.internal/router/timeline"
	"meridian.internal/router/waterfall"
)

// Advice is one question with its answer and the arithmetic behind it.
type Advice struct {
	Question   string   `json:"question"`
	Answer     string   `json:"answer"`
	Arithmetic []string `json:"arithmetic"`
}

// use is what a span tells of a request that a pair served.
type use int

const (
	pairOnly use = iota // it exists only because two nodes serve a request, and is no waiting for a place: on one node it would, too
	door                // waiting at the router
	ctxWait
	genPlace
	genStart
	prefill
	handover
	decode
	unseen // the router's view of a leg, whose node did not tell what it did, or whose clock is not aligned
	uses
)

var usesOf = map[string][]use{
	"gen_prepare": {pairOnly}, "gen_dispatch": {pairOnly}, "gen_parse": {pairOnly}, "gen_admit": {genPlace}, "kv_open": {pairOnly},
	"gen_headers_return": {pairOnly}, "ctx_emit": {pairOnly}, "ctx_return": {pairOnly}, "kv_handover": {pairOnly, handover}, "gen_start": {pairOnly, genStart},
	"router_queue": {door}, "ctx_admit": {ctxWait}, "ctx_queue": {ctxWait}, "device_queue": {ctxWait},
	"prefill": {prefill}, "prefill_wait": {prefill}, "prefill_sample": {prefill}, "prefill_sync": {prefill}, "decode": {decode},
	"gen_leg": {unseen}, "ctx_leg": {unseen}, "remote": {unseen},
}

// tally adds up the requests that a pair served, of which both nodes told what they did.
type tally struct {
	n     int64
	early int64 // of them, generation first
	ttft  float64
	sums  [uses]float64 // ns
}

// add takes in a finished request with a first token.
func (t *tally) add(l *timeline.Line) {
	if l.Style != "generation_first" && l.Style != "context_first" {
		return
	}
	one := tally{n: 1, ttft: float64(*l.TTFTNS)}
	if l.Style == "generation_first" {
		one.early = 1
	}
	for i := range l.Spans {
		for _, u := range usesOf[l.Spans[i].Name] {
			if u == unseen {
				return
			}
			one.sums[u] += float64(l.Spans[i].DurNS)
		}
	}
	t.merge(&one)
}

func (t *tally) merge(o *tally) {
	t.n += o.n
	t.early += o.early
	t.ttft += o.ttft
	for u := range t.sums {
		t.sums[u] += o.sums[u]
	}
}

// mean is what spans of a use take of a request.
func (t *tally) mean(u use) float64 { return t.sums[u] / float64(max(t.n, 1)) }

// Advise answers what an operator asks, from recorded times alone; it says when there is too little to answer.
func (s *Summary) Advise() []Advice {
	return []Advice{s.adviseStyle(), s.adviseSide(), s.adviseHandover()}
}

func dur(ns float64) string { return waterfall.Duration(int64(ns)) }

const enough = 30 // requests

func (s *Summary) adviseStyle() Advice {
	a := Advice{Question: "Would one node for both parts have been faster?"}
	if s.few(&a) {
		return a
	}
	cost := s.paired.mean(pairOnly)
	// On one node the prefill of every other request stands in the way of decode: while a request decodes, prefills run for
	// the share of time that prefill takes of all work of both sides.
	pre, dec := s.paired.mean(prefill), s.paired.mean(decode)
	interference := 0.0
	if pre+dec > 0 {
		interference = dec * pre / (pre + dec)
	}
	a.Arithmetic = []string{
		fmt.Sprintf("a pair costs %s a request: the mean of its extra hops, hand-over and start", dur(cost)),
		fmt.Sprintf("prefill takes %s and decode %s a request", dur(pre), dur(dec)),
		fmt.Sprintf("on one busy node prefill would hold the device for %.0f %% of the time, so that decode would wait about %s", 100*pre/max(pre+dec, 1), dur(interference)),
	}
	if interference > cost {
		a.Answer = fmt.Sprintf("No, under load: the pair spares decode about %s and costs %s.", dur(interference), dur(cost))
	} else {
		a.Answer = fmt.Sprintf("Probably: the pair costs %s and spares decode at most about %s.", dur(cost), dur(interference))
	}
	return a
}

// few says so where there are too few requests of a pair.
func (s *Summary) few(a *Advice) bool {
	if s.paired.n < enough {
		a.Answer = fmt.Sprintf("Cannot tell: of %d finished requests that a pair served both nodes told their times, at least %d are needed.", s.paired.n, enough)
	}
	return s.paired.n < enough
}

func (s *Summary) adviseSide() Advice {
	a := Advice{Question: "Which side needs more nodes?"}
	if s.few(&a) {
		return a
	}
	t := &s.paired
	wait, ctx, place, ttft := t.mean(door), t.mean(ctxWait), t.mean(genPlace), t.ttft/float64(t.n)
	gen := place + t.mean(genStart)
	a.Arithmetic = []string{
		fmt.Sprintf("a request waits %s at the router for room in the cluster, %s for prefill's engine (admission, queue, and the device busy with the step before) and %s for decode's (a place, and the start)", dur(wait), dur(ctx), dur(gen)),
		fmt.Sprintf("that is %.0f %%, %.0f %% and %.0f %% of the mean time to first token, %s", 100*wait/max(ttft, 1), 100*ctx/max(ttft, 1), 100*gen/max(ttft, 1), dur(ttft)),
	}
	if held := t.heldForPrefill(); held*place >= 0.05*ttft {
		ctx, gen = ctx+held*place, gen-held*place
		a.Arithmetic = append(a.Arithmetic, fmt.Sprintf(
			"%.0f %% of the time in which places at decode are taken, their requests wait for prefill or are in it: so much of the wait for a place, %s, is prefill's", 100*held, dur(held*place)))
	}
	switch {
	case wait+ctx+gen < 0.1*ttft:
		a.Answer = "Neither: waiting is less than a tenth of the time to first token."
	case wait > ctx+gen:
		a.Answer = "Cannot tell which: most of the waiting is at the router, for room in the cluster. GET /cluster says which nodes are full."
	case ctx > 2*gen:
		a.Answer = "Prefill: another context node would take most of the waiting away."
	case gen > 2*ctx:
		a.Answer = "Decode: another generation node, or a larger batch on those that are there."
	default:
		a.Answer = "Both wait alike: add to both, or lower the load."
	}
	return a
}

// heldForPrefill is the share of the time in which places at generation nodes are taken, but by requests that prefill has not done with:
// generation first, a request has its place before it is sent to prefill.
func (t *tally) heldForPrefill() float64 {
	held := (t.mean(ctxWait) + t.mean(prefill)) * float64(t.early) / float64(max(t.n, 1))
	return held / max(held+t.mean(genStart)+t.mean(decode), 1)
}

func (s *Summary) adviseHandover() Advice {
	a := Advice{Question: "Does the network hold the hand-over back?"}
	h := s.spans["kv_handover"]
	if s.few(&a) {
		return a
	}
	if h == nil || h.n < enough {
		a.Answer = "Cannot tell: too few hand-overs."
		return a
	}
	q := h.quantiles()
	if s.handover > 0 {
		a.Arithmetic = append(a.Arithmetic, fmt.Sprintf("%.0f %% of the transfers' time passed while prefill still ran", 100*s.hidden/s.handover))
	}
	a.Arithmetic = append(a.Arithmetic,
		fmt.Sprintf("after prefill a request waited %s for its KV at the median, %s at the 99th percentile", waterfall.Duration(q.P50), waterfall.Duration(q.P99)))
	mean, ttft := s.paired.mean(handover), s.paired.ttft/float64(s.paired.n)
	a.Arithmetic = append(a.Arithmetic, fmt.Sprintf("that is %s on average, %.0f %% of the mean time to first token, %s", dur(mean), 100*mean/max(ttft, 1), dur(ttft)))
	if mean > 0.1*ttft {
		a.Answer = "Yes: the visible part is more than a tenth of the time to first token. Smaller prefill chunks start it earlier; a faster link shortens it."
	} else {
		a.Answer = "No: what is left after prefill is less than a tenth of the time to first token."
	}
	return a
}

// WriteAdvice writes advice as text.
func WriteAdvice(w io.Writer, list []Advice, color bool) error {
	p := &page{Writer: bufio.NewWriter(w), color: color}
	for _, a := range list {
		p.printf("\n%s\n  %s\n", p.bold(a.Question), a.Answer)
		for _, line := range a.Arithmetic {
			p.printf("  %s\n", p.grey("· "+line))
		}
	}
	p.printf("\n")
	return p.Flush()
}
