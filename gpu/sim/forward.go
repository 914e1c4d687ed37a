package sim

import (
	"meridian.internal/gpu/backend"
)

// begin applies what comes before the forward and sets the state of each row: of the token and its position, or the
// hidden state that the stage before gave.
func (r *runner) begin(b *backend.Batch) {
	for _, a := range b.Assign {
		s := &r.slots[a.Slot]
		s.state.Reset(a.Sampling, a.History, a.PromptLen)
		s.plain = a.Sampling.Temperature <= 0 && !a.Sampling.Penalized() && len(a.Sampling.LogitBias) == 0 && !s.state.Logprobs()
	}
	for _, c := range b.Copies {
		r.memory.copyBlock(c)
	}
	r.rows = r.rows[:0]
	in, _ := b.Hidden.(backend.HostHidden) // as check has seen
	for i := range b.Entries {
		e := &b.Entries[i]
		for q := range e.Queries() {
			if r.cfg.Stage.First > 0 {
				r.rows = append(r.rows, fromHidden(in[len(r.rows)*hidden:]))
				continue
			}
			token := r.slots[e.Slot].last
			if e.Tokens != nil {
				token = e.Tokens[q]
			}
			r.rows = append(r.rows, mix(uint64(uint32(token))<<32|uint64(e.KVLen+q)))
		}
	}
}

// layer runs one layer of all entries: each query token writes its KV, reads that of all tokens up to itself, and folds
// the sum into its state. The sum does not depend on how the tokens were cut into chunks.
func (r *runner) layer(b *backend.Batch, layer int) {
	row := 0
	for i := range b.Entries {
		e := &b.Entries[i]
		sum := r.history(e, layer)
		for q := range e.Queries() {
			at := e.KVLen + q
			s := r.rows[row]
			r.store(e, layer, at, mix(s+uint64(layer)))
			window := r.window(layer)
			switch {
			case r.cfg.Shallow:
				sum = 0
				if at > 0 && window != 1 {
					sum = r.load(e, layer, at-1)
				}
			case window > 0 && q > 0 && at >= window:
				sum -= r.load(e, layer, at-window)
			}
			sum += r.load(e, layer, at)
			r.rows[row] = mix(s ^ sum)
			row++
		}
	}
}

// window is the number of tokens that a query sees in a layer, 0 for all.
func (r *runner) window(layer int) int {
	if r.cfg.Windows == nil {
		return 0
	}
	return r.cfg.Windows[layer]
}

// history is the sum over the tokens that are in KV already and that the first query sees.
func (r *runner) history(e *backend.Entry, layer int) uint64 {
	if r.cfg.Shallow {
		return 0
	}
	sum, from := uint64(0), 0
	if w := r.window(layer); w > 0 {
		from = max(e.KVLen-w+1, 0)
	}
	for at := from; at < e.KVLen; at++ {
		sum += r.load(e, layer, at)
	}
	return sum
}

func (r *runner) store(e *backend.Entry, layer, at int, word uint64) {
	block, token := r.memory.table(e, layer)[at/r.cfg.TokensPerBlock], at%r.cfg.TokensPerBlock
	for kv := range 2 {
		for i := range r.memory.at(block, layer, kv, token) {
			word = word*0xd1342543de82ef95 + 1 // each element differs, so that a swap is seen
			r.memory.at(block, layer, kv, token)[i] = word
		}
	}
}

// load is what the attention takes from one token: all words of its KV, weighted by place and position.
func (r *runner) load(e *backend.Entry, layer, at int) uint64 {
	block, token := r.memory.table(e, layer)[at/r.cfg.TokensPerBlock], at%r.cfg.TokensPerBlock
	sum, weight := uint64(0), uint64(2*at+1)
	for kv := range 2 {
		for _, w := range r.memory.at(block, layer, kv, token) {
			sum += w * weight
			weight = weight*3 + 2
		}
	}
	return sum
}

// end samples the wanted tokens, or gives the hidden states to the next stage.
func (r *runner) end(b *backend.Batch, step *backend.Step) {
	if r.cfg.Stage.End < r.cfg.Layers {
		out := make(backend.HostHidden, 0, len(r.rows)*hidden)
		for _, s := range r.rows {
			out = appendHidden(out, s)
		}
		step.Hidden = out
		return
	}
	step.Outputs = make([]backend.Output, len(b.Entries))
	tokens := make([]int32, 0, len(b.Entries)) // one allocation for all; grown only by entries with many positions
	row := 0
	for i := range b.Entries {
		e := &b.Entries[i]
		from := len(tokens)
		for _, q := range e.Logits {
			token, ok := r.choose(e, q, r.rows[row+q], &step.Outputs[i])
			if !ok {
				break // fewer tokens than wanted: the executor ends this sequence alone
			}
			tokens = append(tokens, token)
		}
		step.Outputs[i].Tokens = tokens[from:len(tokens):len(tokens)]
		row += e.Queries()
	}
}

// candidates is how many tokens have a logit worth speaking of: the first of them the largest.
const candidates = 16

func (r *runner) choose(e *backend.Entry, query int, s uint64, out *backend.Output) (int32, bool) {
	sl := &r.slots[e.Slot]
	if sl.plain && e.Mask == nil {
		sl.last = r.candidate(s, 0)
		return sl.last, true
	}
	if r.logits == nil {
		r.logits = make([]float32, r.cfg.Vocab)
	}
	for i := range r.logits {
		r.logits[i] = -30
	}
	for i := candidates - 1; i >= 0; i-- { // where two fall on one token the larger logit stays
		r.logits[r.candidate(s, i)] = 8 - 0.75*float32(i)
	}
	c, err := sl.state.Sample(r.logits, e.KVLen+query+1, e.Mask, &r.scratch)
	if err != nil {
		return 0, false
	}
	if sl.state.Logprobs() {
		out.Logprobs = append(out.Logprobs, c.Logprobs)
	}
	sl.last = c.Token
	return c.Token, true
}

func (r *runner) candidate(s uint64, i int) int32 {
	return int32(mix(s+uint64(i)*0x9e3779b97f4a7c15) % uint64(r.cfg.Vocab))
}

func fromHidden(h []float32) uint64 {
	s := uint64(0)
	for i := range hidden {
		s |= uint64(h[i]) << (16 * i)
	}
	return s
}

func appendHidden(dst []float32, s uint64) []float32 {
	for i := range hidden {
		dst = append(dst, float32(uint16(s>>(16*i))))
	}
	return dst
}

// mix is the output function of SplitMix64 over one step of its sequence.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
