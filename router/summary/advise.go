package summary

import (
	"bufio"
	"fmt"
	"io"

	"meridian.internal/router/waterfall"
)

// Advice is one question with its answer and the arithmetic behind it.
type Advice struct {
	Question   string   `json:"question"`
	Answer     string   `json:"answer"`
	Arithmetic []string `json:"arithmetic"`
}

// Spans by what they are for.
var (
	// pairOnly exist only because two nodes serve a request. To wait for a place is not of them: on one node it would, too.
	pairOnly = []string{"gen_prepare", "gen_dispatch", "gen_parse", "kv_open", "gen_headers_return", "ctx_emit", "ctx_return", "kv_handover", "gen_start"}
	ctxWait  = []string{"ctx_queue", "device_queue", "queue"}
	genPlace = []string{"gen_admit"}
	genStart = []string{"gen_start"}
	prefill  = []string{"prefill", "prefill_wait", "prefill_sample", "prefill_sync"}
	decode   = []string{"decode"}
)

// Advise answers what an operator asks, from recorded times alone; it says when there is too little to answer.
func (s *Summary) Advise() []Advice {
	return []Advice{s.adviseStyle(), s.adviseSide(), s.adviseHandover()}
}

// mean is what spans take of a request of this file on average, where they occur or not.
func (s *Summary) mean(names []string) float64 {
	sum := 0.0
	for _, n := range names {
		if h := s.spans[n]; h != nil {
			sum += h.sum
		}
	}
	return sum / float64(max(s.e2e.n, 1))
}

func dur(ns float64) string { return waterfall.Duration(int64(ns)) }

const enough = 30 // requests

func (s *Summary) adviseStyle() Advice {
	a := Advice{Question: "Would one node for both parts have been faster?"}
	pairs := s.counts.Styles["generation_first"] + s.counts.Styles["context_first"]
	if pairs < enough || s.e2e.n < enough {
		a.Answer = fmt.Sprintf("Cannot tell: %d requests were served by a pair and %d finished, at least %d of each are needed.", pairs, s.e2e.n, enough)
		return a
	}
	cost := s.mean(pairOnly)
	// On one node the prefill of every other request stands in the way of decode: while a request decodes, prefills run for
	// the share of time that prefill takes of all work of both sides.
	pre, dec := s.mean(prefill), s.mean(decode)
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

func (s *Summary) adviseSide() Advice {
	a := Advice{Question: "Which side needs more nodes?"}
	if s.e2e.n < enough {
		a.Answer = fmt.Sprintf("Cannot tell: %d finished requests, at least %d are needed.", s.e2e.n, enough)
		return a
	}
	ctx, place, ttft := s.mean(ctxWait), s.mean(genPlace), s.ttft.sum/float64(max(s.ttft.n, 1))
	gen := place + s.mean(genStart)
	a.Arithmetic = []string{
		fmt.Sprintf("a request waits %s for prefill's engine (queue, and the device busy with the step before) and %s for decode's (a place, and the start)", dur(ctx), dur(gen)),
		fmt.Sprintf("that is %.0f %% and %.0f %% of the mean time to first token, %s", 100*ctx/max(ttft, 1), 100*gen/max(ttft, 1), dur(ttft)),
	}
	if held := s.heldForPrefill(); held*place >= 0.05*ttft {
		ctx, gen = ctx+held*place, gen-held*place
		a.Arithmetic = append(a.Arithmetic, fmt.Sprintf(
			"%.0f %% of the time in which places at decode are taken, their requests wait for prefill or are in it: so much of the wait for a place, %s, is prefill's", 100*held, dur(held*place)))
	}
	switch {
	case ctx+gen < 0.1*ttft:
		a.Answer = "Neither: waiting is less than a tenth of the time to first token."
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
func (s *Summary) heldForPrefill() float64 {
	early := s.counts.Styles["generation_first"]
	pairs := early + s.counts.Styles["context_first"]
	held := (s.mean(ctxWait) + s.mean(prefill)) * float64(early) / float64(max(pairs, 1))
	return held / max(held+s.mean(genStart)+s.mean(decode), 1)
}

func (s *Summary) adviseHandover() Advice {
	a := Advice{Question: "Does the network hold the hand-over back?"}
	h := s.spans["kv_handover"]
	if h == nil || h.n < enough {
		a.Answer = "Cannot tell: too few hand-overs."
		return a
	}
	q := h.quantiles()
	hiddenShare := 0.0
	if s.handover > 0 {
		hiddenShare = s.hidden / s.handover
	}
	a.Arithmetic = []string{
		fmt.Sprintf("%.0f %% of the transfers' time passed while prefill still ran", 100*hiddenShare),
		fmt.Sprintf("after prefill a request waited %s for its KV at the median, %s at the 99th percentile", waterfall.Duration(q.P50), waterfall.Duration(q.P99)),
	}
	if float64(q.P50) > 0.1*float64(s.ttft.quantiles().P50) {
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
