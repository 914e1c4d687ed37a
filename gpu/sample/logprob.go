package sample

import (
	"math"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// logprobs gives the log softmax of the chosen token and of the n most likely ones.
func logprobs(logits []float32, token int32, n int) backend.Logprobs {
	best, ok := argmax(logits)
	if !ok {
		return backend.Logprobs{}
	}
	top := float64(logits[best])
	if math.IsInf(top, 1) {
		return backend.Logprobs{} // certainty; its logarithm is 0, and inf - inf would be NaN
	}
	sum := 0.0
	for _, l := range logits {
		if l == l { // NaN counts as minus infinity
			sum += math.Exp(float64(l) - top)
		}
	}
	norm := top + math.Log(sum)
	out := backend.Logprobs{Logprob: float32(float64(logits[token]) - norm)}
	for _, c := range mostLikely(logits, n) {
		out.Top = append(out.Top, infer.Logprob{Token: c.token, Logprob: float32(c.w - norm)})
	}
	return out
}

// mostLikely returns the n largest logits, largest first, by insertion: n is small (at most 20 in OpenAI's API).
func mostLikely(logits []float32, n int) []candidate {
	if n <= 0 {
		return nil
	}
	n = min(n, len(logits))
	list := make([]candidate, 0, n+1)
	for i, l := range logits {
		c := candidate{float64(l), int32(i)}
		if l != l || math.IsInf(c.w, -1) || (len(list) == n && !c.before(list[n-1])) {
			continue
		}
		at := len(list)
		for at > 0 && c.before(list[at-1]) {
			at--
		}
		list = append(list, candidate{})
		copy(list[at+1:], list[at:])
		list[at] = c
		list = list[:min(len(list), n)]
	}
	return list
}
