// Package sample owns the choice of one token from one row of logits: penalties, bias, mask, temperature, top-k, top-p,
// min-p, seeded noise and log probabilities. It is pure: no clock, no goroutine, no random source. The choice is a
// function of the logits, the sequence's own tokens, its sampling parameters and the position; never of what else is in
// the batch. It does not know slots, steps or text.
//
// The order of the operations, each working on the result of the one before:
//
//	mask -> logit bias -> repetition, presence, frequency penalty -> temperature -> top-k -> top-p -> min-p -> draw
//
// Log probabilities are those of the model itself: log softmax of the logits as they came in, in float64, before any of
// the above. Ties go to the lowest token id everywhere.
package sample

import (
	"errors"
	"math"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// ErrNoToken is returned when no token may be chosen: the mask allows none, or the logits of all allowed tokens are NaN
// or minus infinity. A back end then leaves the token out of the entry's Output, and the executor fails that sequence
// alone.
var ErrNoToken = errors.New("sample: no token has a finite logit")

// Choice is one sampled token.
type Choice struct {
	Token    int32
	Logprobs backend.Logprobs // filled when the sampling asks for logprobs
}

// State is the sampling state of one slot. It has one owner, the device's goroutine; the zero value is greedy.
type State struct {
	sampling infer.Sampling
	counts   counts
}

// Scratch holds buffers that calls of Sample reuse, so that no call allocates after growth. One per goroutine; the zero
// value is ready.
type Scratch struct {
	logits []float32
	heap   []candidate
}

// Reset begins a sequence. History is needed only when the sampling is penalized: all tokens so far, of which the first
// promptLen are the prompt. It is not kept.
func (s *State) Reset(sampling infer.Sampling, history []int32, promptLen int) {
	s.sampling = sampling
	s.counts.reset()
	if !sampling.Penalized() {
		return
	}
	for i, t := range history {
		s.counts.add(t, i >= promptLen)
	}
}

// Logprobs tells whether the results of Sample carry log probabilities.
func (s *State) Logprobs() bool { return s.sampling.Logprobs || s.sampling.TopLogprobs > 0 }

// Sample chooses the token at a position of the sequence (the position of the sampled token, not of the query token
// before it) and remembers it for the penalties of later positions. A nil mask allows all tokens; a token beyond the end
// of the mask is not allowed. The logits are not changed.
func (s *State) Sample(logits []float32, position int, mask []uint32, sc *Scratch) (Choice, error) {
	row := logits
	if mask != nil || len(s.sampling.LogitBias) > 0 || len(s.counts.list) > 0 {
		row = append(sc.logits[:0], logits...)
		sc.logits = row
		applyMask(row, mask)
		applyBias(row, s.sampling.LogitBias)
		s.counts.penalize(row, s.sampling)
	}
	token, ok := argmax(row)
	if !ok {
		return Choice{}, ErrNoToken
	}
	if s.sampling.Temperature > 0 && s.sampling.TopK != 1 {
		token = s.draw(row, token, position, sc)
	}
	c := Choice{Token: token}
	if s.Logprobs() {
		c.Logprobs = logprobs(logits, token, s.sampling.TopLogprobs)
	}
	if s.sampling.Penalized() {
		s.counts.add(token, true)
	}
	return c, nil
}

// argmax returns the lowest id with the largest logit; false if all are NaN or minus infinity.
func argmax(row []float32) (int32, bool) {
	best, at := float32(math.Inf(-1)), -1
	for i, v := range row {
		if v > best {
			best, at = v, i
		}
	}
	return int32(at), at >= 0
}

func applyMask(row []float32, mask []uint32) {
	if mask == nil {
		return
	}
	none := float32(math.Inf(-1))
	for i := range row {
		if w := i / 32; w >= len(mask) || mask[w]>>(i%32)&1 == 0 {
			row[i] = none
		}
	}
}

func applyBias(row []float32, bias map[int32]float32) {
	for t, b := range bias { // each token on its own: the order of the map does not matter
		if t >= 0 && int(t) < len(row) {
			row[t] += b
		}
	}
}
