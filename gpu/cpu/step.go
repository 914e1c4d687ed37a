package cpu

import (
	"meridian.internal/gpu/backend"
)

// run executes one step.
func (d *device) run(b *backend.Batch, s *backend.Step) error {
	events, err := d.events.Take(b.Iter)
	if err != nil {
		return err
	}
	defer func() { s.Stamps = events.Read() }()
	events.Mark(d.now())
	if err := d.check(b); err != nil {
		return err
	}
	for _, a := range b.Assign {
		d.slots[a.Slot].sample.Reset(a.Sampling, a.History, a.PromptLen)
		d.slots[a.Slot].last = 0
	}
	for _, c := range b.Copies {
		d.kv.copyBlock(c)
	}
	d.gatherRows(b)
	d.forward(b)
	if !d.samples() {
		s.Hidden = d.hiddenOut()
	}
	events.Mark(d.now())
	s.Outputs = make([]backend.Output, len(b.Entries))
	if d.samples() {
		d.sample(b, s.Outputs)
	}
	events.Mark(d.now())
	return nil
}

// gatherRows lists the query tokens of all entries and fills the residual stream with their embeddings, or with the
// hidden states of the stage before.
func (d *device) gatherRows(b *backend.Batch) {
	d.rows = d.rows[:0]
	for i := range b.Entries {
		e := &b.Entries[i]
		wanted := e.Logits
		for j := range e.Queries() {
			r := row{entry: i, pos: e.KVLen + j}
			if len(wanted) > 0 && wanted[0] == j {
				r.wanted, wanted = true, wanted[1:]
			}
			d.rows = append(d.rows, r)
		}
	}
	d.hidden.resize(len(d.rows))
	hidden, _ := b.Hidden.(backend.HostHidden) // as check has seen
	for i, r := range d.rows {
		h := d.hidden.row(i)[:d.info.Hidden]
		if d.info.Stage.First > 0 {
			copy(h, hidden[i*len(h):])
			continue
		}
		e := &b.Entries[r.entry]
		token := d.slots[e.Slot].last
		if e.Tokens != nil {
			token = e.Tokens[r.pos-e.KVLen]
		}
		d.embed.Row(int(token), h)
	}
}

func (d *device) hiddenOut() backend.HostHidden {
	out := make(backend.HostHidden, 0, len(d.rows)*d.info.Hidden)
	for i := range d.rows {
		out = append(out, d.hidden.row(i)[:d.info.Hidden]...)
	}
	return out
}

// sample chooses a token for each row of logits, entries in parallel: a slot belongs to one entry, so workers share
// nothing.
func (d *device) sample(b *backend.Batch, outputs []backend.Output) {
	first := make([]int, len(b.Entries))
	n := 0
	for i := range b.Entries {
		first[i] = n
		n += len(b.Entries[i].Logits)
	}
	d.pool.run(len(b.Entries), n*d.info.Vocab, func(worker, i int) {
		d.sampleEntry(&b.Entries[i], first[i], &outputs[i], worker)
	})
}

// sampleEntry leaves out a position at which no token may be chosen; the executor ends that sequence. Should a step
// that is already queued ask for the missing token, it gets token 0, and nobody reads what comes of it.
func (d *device) sampleEntry(e *backend.Entry, logits int, out *backend.Output, worker int) {
	s := &d.slots[e.Slot]
	for i, j := range e.Logits {
		c, err := s.sample.Sample(d.logits.row(logits+i), e.KVLen+j+1, e.Mask, &d.scratch[worker].sample)
		s.last = 0
		if err != nil {
			return
		}
		s.last = c.Token
		out.Tokens = append(out.Tokens, c.Token)
		if s.sample.Logprobs() {
			out.Logprobs = append(out.Logprobs, c.Logprobs)
		}
	}
}
