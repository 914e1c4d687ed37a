package sample

import "meridian.internal/shared/infer"

// counts holds how often each token stands in the sequence: what the penalties need. A list with an index instead of an
// array over the vocabulary, because a slot's sequence is short and the vocabulary is not.
type counts struct {
	list  []count
	index map[int32]int // token -> place in list
}

type count struct {
	token  int32
	output int32 // times among the output tokens; the prompt only makes the entry exist
}

func (c *counts) reset() {
	c.list = c.list[:0]
	clear(c.index)
}

func (c *counts) add(token int32, output bool) {
	at, ok := c.index[token]
	if !ok {
		if c.index == nil {
			c.index = make(map[int32]int)
		}
		at = len(c.list)
		c.index[token] = at
		c.list = append(c.list, count{token: token})
	}
	if output {
		c.list[at].output++
	}
}

// penalize lowers the logits of tokens that the sequence already holds:
//
//	repetition r (prompt and output): l = l/r if l > 0, else l*r        (CTRL, Keskar et al. 2019)
//	frequency f, presence p (output): l = l - f*count - p*[count > 0]   (OpenAI API)
func (c *counts) penalize(row []float32, s infer.Sampling) {
	repeat := s.RepetitionPenalty
	for _, e := range c.list {
		if e.token < 0 || int(e.token) >= len(row) {
			continue
		}
		l := row[e.token]
		if repeat != 0 && repeat != 1 {
			if l > 0 {
				l /= repeat
			} else {
				l *= repeat
			}
		}
		if e.output > 0 {
			// The conversions forbid a fused multiply-add: equal bits on all architectures.
			l = float32(l - float32(s.FrequencyPenalty*float32(e.output)))
			l = float32(l - s.PresencePenalty)
		}
		row[e.token] = l
	}
}
