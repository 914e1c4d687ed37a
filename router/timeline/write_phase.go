package timeline

import (
	"strconv"

	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/phase"
)

// appendPhase writes a phase. Its rows have a fixed order (docs/timeline.md): with names they would be most of a line.
func appendPhase(w *jsonline.Writer, l *Line, p *Phase) {
	w.Open('{')
	w.Str("role", string(p.Role))
	w.Str("node", p.Node)
	w.OptInt("sub", int64(p.Sub))
	w.OptInt("attempt", int64(p.Attempt))
	if p.Disagg != l.DisaggRequestID {
		appendID(w, p.Disagg)
	}
	if !p.Clock.is(l.Reference) {
		appendClock(w, &p.Clock)
	}
	c := converter{&p.Clock, l.StartNS}
	appendStamps(w, "stamps_ns", stampNames[:], p.Stamps, c)
	if p.Role != phase.Disagg || p.Tokens != l.Tokens {
		appendRow(w, "tokens", int64(p.Tokens.Prompt), int64(p.Tokens.Cached), int64(p.Tokens.Output))
	}
	if k := p.KV; k != nil {
		appendRow(w, "kv_blocks", int64(k.AllocTotalBlocks), int64(k.AllocNewBlocks), int64(k.ReusedBlocks), int64(k.PartialBlocks), int64(k.MissedBlocks))
		if k.HostBlocks+k.DiskBlocks > 0 {
			appendRow(w, "kv_tier_blocks", int64(k.HostBlocks), int64(k.DiskBlocks))
		}
	}
	peer, bytes := "", int64(0)
	if len(p.Transfer) > 0 {
		appendStamps(w, "transfer_ns", transferNames[:], p.Transfer, c)
		peer, bytes = l.transferOf(p)
	}
	if p.Peer != peer {
		w.Str("peer", p.Peer)
	}
	if p.Bytes != bytes {
		w.Int("bytes", p.Bytes)
	}
	appendColumns(w, "chunks", p.Chunks)
	appendColumns(w, "steps", p.Steps)
	w.OptInt("step_messages", int64(p.StepMessages))
	w.OptInt("truncated", p.Truncated)
	switch chunks := itersOf(p); {
	case p.Iters == nil && chunks != nil:
		w.Null("iters")
	case p.Iters != nil && (chunks == nil || *p.Iters != *chunks):
		appendRow(w, "iters", p.Iters.First, p.Iters.Last)
	}
	if p.DPRank != nil {
		w.Int("dp_rank", int64(*p.DPRank))
	}
	w.OptInt("preemptions", int64(p.Preemptions))
	w.OptInt("preempted_ns", p.PreemptedNS)
	w.PtrInt("pushed_offset_ns", p.PushedNS)
	if p.EnergyJ != nil {
		w.Float("energy_j", *p.EnergyJ)
	}
	w.Close('}')
}

func appendID(w *jsonline.Writer, id int64) {
	w.Key("disagg_request_id")
	w.B = append(strconv.AppendInt(append(w.B, '"'), id, 10), '"')
}

func appendClock(w *jsonline.Writer, c *PhaseClock) {
	w.OpenKey("clock", '{')
	w.Str("id", string(c.ID))
	w.Str("state", c.State)
	w.NullInt("offset_ns", c.OffsetNS)
	w.OptInt("skew_ppb", c.SkewPPB)
	w.OptInt("at_ns", c.AtNS)
	w.NullInt("bound_ns", c.BoundNS)
	w.OptStr("via", c.Via)
	w.Close('}')
}

func appendRow(w *jsonline.Writer, key string, values ...int64) {
	w.OpenKey(key, '[')
	for _, v := range values {
		w.ItemInt(v)
	}
	w.Close(']')
}

// appendStamps writes the converted stamps in the order of names, null for those that are absent. The raw one is written
// beside it, as [converted, raw], where it does not follow from the converted one.
func appendStamps(w *jsonline.Writer, key string, names []string, list []Stamp, c converter) {
	w.OpenKey(key, '[')
	for _, name := range names {
		if len(list) == 0 {
			break
		}
		s := list[0]
		if s.Name != name {
			appendNull(w)
			continue
		}
		list = list[1:]
		switch {
		case s.Ref == nil:
			w.Open('[')
			appendNull(w)
			w.ItemInt(s.Raw)
			w.Close(']')
		case c.raw(*s.Ref) != s.Raw:
			w.Open('[')
			w.ItemInt(*s.Ref)
			w.ItemInt(s.Raw)
			w.Close(']')
		default:
			w.ItemInt(*s.Ref)
		}
	}
	w.Close(']')
}

func appendNull(w *jsonline.Writer) {
	if c := w.B[len(w.B)-1]; c != '[' {
		w.B = append(w.B, ',')
	}
	w.B = append(w.B, "null"...)
}

// appendDecision writes the decision with its candidates as columns.
func appendDecision(w *jsonline.Writer, d *phase.Decision) {
	w.OpenKey("decision", '{')
	phase.AppendChoice(w, d)
	if len(d.Candidates) > 0 {
		appendCandidates(w, d.Candidates)
	}
	w.Close('}')
}

func appendCandidates(w *jsonline.Writer, list []phase.Candidate) {
	w.OpenKey("candidates", '{')
	w.OpenKey("node", '[')
	for i := range list {
		w.ItemStr(list[i].Node)
	}
	w.Close(']')
	w.OpenKey("score", '[')
	for i := range list {
		if i > 0 {
			w.B = append(w.B, ',')
		}
		w.B = jsonline.AppendFloat(w.B, list[i].Score)
	}
	w.Close(']')
	looked := false
	for i := range list {
		looked = looked || list[i].MatchedTokens != nil
	}
	for _, c := range candidateColumns {
		if c.name == "matched_tokens" && !looked {
			continue
		}
		w.OpenKey(c.name, '[')
		for i := range list {
			if v, ok := c.get(&list[i]); ok {
				w.ItemInt(v)
			} else {
				appendNull(w)
			}
		}
		w.Close(']')
	}
	w.Close('}')
}

// candidateColumns are the whole numbers of a candidate.
var candidateColumns = []struct {
	name string
	get  func(*phase.Candidate) (v int64, ok bool)
	set  func(*phase.Candidate, int64)
}{
	{"running", func(c *phase.Candidate) (int64, bool) { return int64(c.Running), true }, func(c *phase.Candidate, v int64) { c.Running = int(v) }},
	{"waiting", func(c *phase.Candidate) (int64, bool) { return int64(c.Waiting), true }, func(c *phase.Candidate, v int64) { c.Waiting = int(v) }},
	{"load_age_ns", func(c *phase.Candidate) (int64, bool) { return known(c.LoadAgeNS) }, func(c *phase.Candidate, v int64) { c.LoadAgeNS = &v }},
	{"queued_tokens", func(c *phase.Candidate) (int64, bool) { return int64(c.QueuedTokens), true }, func(c *phase.Candidate, v int64) { c.QueuedTokens = int(v) }},
	{"reserved", func(c *phase.Candidate) (int64, bool) { return int64(c.Reserved), true }, func(c *phase.Candidate, v int64) { c.Reserved = int(v) }},
	{"matched_tokens", func(c *phase.Candidate) (int64, bool) { return known(c.MatchedTokens) }, func(c *phase.Candidate, v int64) { c.MatchedTokens = &v }},
}

func known(v *int64) (int64, bool) {
	if v == nil {
		return 0, false
	}
	return *v, true
}
