package timeline

import (
	"slices"
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
	if p.PushedNS != nil || !p.Clock.is(l.Reference) {
		appendClock(w, &p.Clock, p.PushedNS)
	}
	if k := p.Rank; k != nil {
		w.OpenKey("rank_clock", '[')
		w.ItemStr(string(k.ID))
		w.ItemStr(k.State)
		w.ItemInt(k.BoundNS)
		w.ItemInt(k.OffsetNS)
		w.Close(']')
	}
	c := converter{&p.Clock, l.StartNS}
	appendStamps(w, "stamps_ns", stampNames[:], p.Stamps, c)
	if p.Role != phase.Disagg || p.Tokens != l.Tokens {
		prompt, cached := p.Tokens.Known()
		w.OpenKey("tokens", '[')
		w.ItemPtr(prompt)
		w.ItemPtr(cached)
		w.ItemInt(int64(p.Tokens.Output))
		w.Close(']')
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
	w.OptInt("fetched_tokens", int64(p.Fetched))
	appendChunks(w, p.Chunks)
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
	if p.EnergyJ != nil {
		w.Float("energy_j", *p.EnergyJ)
	}
	w.Close('}')
}

func appendID(w *jsonline.Writer, id int64) {
	w.Key("disagg_request_id")
	w.B = append(strconv.AppendInt(append(w.B, '"'), id, 10), '"')
}

// appendClock writes the clock's row. What clocks mostly lack is at its end, and left out there.
func appendClock(w *jsonline.Writer, c *PhaseClock, pushed *int64) {
	w.OpenKey("clock", '[')
	w.ItemStr(string(c.ID))
	w.ItemStr(c.State)
	skewed := c.SkewPPB != 0 || c.AtNS != 0 || c.Via != ""
	if skewed || pushed != nil || c.OffsetNS != nil || c.BoundNS != nil {
		w.ItemPtr(c.BoundNS)
		w.ItemPtr(c.OffsetNS)
	}
	if skewed || pushed != nil {
		w.ItemPtr(pushed)
	}
	if skewed {
		w.ItemInt(c.SkewPPB)
		w.ItemInt(c.AtNS)
	}
	if c.Via != "" {
		w.ItemStr(c.Via)
	}
	w.Close(']')
}

func appendChunks(w *jsonline.Writer, c *Columns) {
	if c == nil {
		return
	}
	w.OpenKey("chunks", '[')
	for _, values := range c.Values {
		appendItems(w, values)
	}
	w.Close(']')
}

func appendItems(w *jsonline.Writer, values []int64) {
	w.Open('[')
	for _, v := range values {
		w.ItemInt(v)
	}
	w.Close(']')
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
			w.ItemPtr(nil)
			continue
		}
		list = list[1:]
		switch {
		case s.Ref == nil:
			w.Open('[')
			w.ItemPtr(nil)
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

// appendDecision writes the decision with its candidates as columns whose order is fixed.
func appendDecision(w *jsonline.Writer, d *phase.Decision) {
	w.OpenKey("decision", '{')
	phase.AppendChoice(w, d)
	if len(d.Candidates) > 0 {
		appendCandidates(w, d.Candidates)
	}
	w.Close('}')
}

func appendCandidates(w *jsonline.Writer, list []phase.Candidate) {
	w.OpenKey("candidates", '[')
	w.Open('[')
	for i := range list {
		w.ItemStr(list[i].Node)
	}
	w.Close(']')
	w.Open('[')
	for i := range list {
		w.ItemFloat(list[i].Score)
	}
	w.Close(']')
	columns := candidateColumns[:]
	if !slices.ContainsFunc(list, func(c phase.Candidate) bool { return c.MatchedTokens != nil }) { // nobody looked
		columns = columns[:len(columns)-1]
	}
	for _, c := range columns {
		w.Open('[')
		for i := range list {
			if v, ok := c.get(&list[i]); ok {
				w.ItemInt(v)
			} else {
				w.ItemPtr(nil)
			}
		}
		w.Close(']')
	}
	w.Close(']')
}
