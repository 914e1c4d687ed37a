package timeline

import (
	"fmt"
	"math"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/phase"
)

// parsePhase reads a phase. What it leaves to its line is marked until restore.
func parsePhase(r *jsonline.Reader) (p Phase) {
	p.Disagg, p.Bytes, p.Peer, p.Tokens.Prompt, p.Iters = ofLine, ofLine, peerOfLine, ofLine, itersOfChunks
	if !r.Object() {
		return p
	}
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		if !phaseIdentity(r, key, &p) && !phaseBody(r, key, &p) {
			r.Skip()
		}
	}
	return p
}

func phaseIdentity(r *jsonline.Reader, key string, p *Phase) bool {
	switch key {
	case "role":
		p.Role = phase.Role(r.String())
	case "node":
		p.Node = r.String()
	case "sub":
		p.Sub = int(r.Int())
	case "attempt":
		p.Attempt = int(r.Int())
	case "disagg_request_id":
		p.Disagg = r.IntString()
	case "clock":
		p.Clock = parsePhaseClock(r)
	case "peer":
		p.Peer = r.String()
	case "bytes":
		p.Bytes = r.Int()
	default:
		return false
	}
	return true
}

func phaseBody(r *jsonline.Reader, key string, p *Phase) bool {
	switch key {
	case "stamps_ns":
		p.Stamps = parseStamps(r, stampNames[:])
	case "transfer_ns":
		p.Transfer = parseStamps(r, transferNames[:])
	case "tokens":
		var prompt, cached, output int64
		parseRow(r, &prompt, &cached, &output)
		p.Tokens = phase.Tokens{Prompt: int(prompt), Cached: int(cached), Output: int(output)}
	case "kv_blocks":
		var total, fresh, reused, partial, missed int64
		if parseRow(r, &total, &fresh, &reused, &partial, &missed) {
			p.KV = &infer.KVCounts{
				AllocTotalBlocks: int(total), AllocNewBlocks: int(fresh), ReusedBlocks: int(reused), PartialBlocks: int(partial), MissedBlocks: int(missed),
			}
		}
	case "kv_tier_blocks": // after kv_blocks
		var host, disk int64
		if parseRow(r, &host, &disk) && p.KV != nil {
			p.KV.HostBlocks, p.KV.DiskBlocks = int(host), int(disk)
		}
	case "chunks":
		p.Chunks = parseColumns(r)
	case "steps":
		p.Steps = parseColumns(r)
	case "step_messages":
		p.StepMessages = int(r.Int())
	case "truncated":
		p.Truncated = r.Int()
	case "iters":
		p.Iters = nil
		var iters phase.Iters
		if parseRow(r, &iters.First, &iters.Last) {
			p.Iters = &iters
		}
	case "dp_rank":
		p.DPRank = phase.ParseRank(r)
	case "preemptions":
		p.Preemptions = int(r.Int())
	case "preempted_ns":
		p.PreemptedNS = r.Int()
	case "pushed_offset_ns":
		p.PushedNS = r.IntPtr()
	case "energy_j":
		if !r.Null() {
			v := r.Float()
			p.EnergyJ = &v
		}
	default:
		return false
	}
	return true
}

func parsePhaseClock(r *jsonline.Reader) (c PhaseClock) {
	if !r.Object() {
		return c
	}
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "id":
			c.ID = clock.ID(r.String())
		case "state":
			c.State = r.String()
		case "offset_ns":
			c.OffsetNS = r.IntPtr()
		case "skew_ppb":
			c.SkewPPB = r.Int()
		case "at_ns":
			c.AtNS = r.Int()
		case "bound_ns":
			c.BoundNS = r.IntPtr()
		case "via":
			c.Via = r.String()
		default:
			r.Skip()
		}
	}
	return c
}

// ofLine, peerOfLine and itersOfChunks mark what is told elsewhere.
const (
	ofLine     = math.MinInt64
	peerOfLine = "\x00"
)

var itersOfChunks = new(phase.Iters) // known by its address

// unread marks a raw stamp that follows from its converted one.
const unread = math.MinInt64

// parseStamps reads a row of stamps: null, converted, or [converted or null, raw].
func parseStamps(r *jsonline.Reader, names []string) []Stamp {
	if !r.Array() {
		return nil
	}
	list := make([]Stamp, 0, len(names))
	refs := make([]int64, len(names)) // one allocation for all
	for i := 0; r.Item(); i++ {
		switch {
		case i >= len(names): // of a later version
			r.Skip()
		case r.Next() == '[':
			s := Stamp{Name: names[i]}
			r.Array()
			for n := 0; r.Item(); n++ {
				switch n {
				case 0:
					s.Ref = r.IntPtr()
				case 1:
					s.Raw = r.Int()
				default:
					r.Skip()
				}
			}
			list = append(list, s)
		case !r.Null():
			refs[i] = r.Int()
			list = append(list, Stamp{Name: names[i], Raw: unread, Ref: &refs[i]})
		}
	}
	return list
}

// parseRow reads a row of whole numbers; false: it is null. What is missing at its end stays 0.
func parseRow(r *jsonline.Reader, values ...*int64) bool {
	if !r.Array() {
		return false
	}
	for i := 0; r.Item(); i++ {
		if i < len(values) {
			*values[i] = r.Int()
		} else {
			r.Skip()
		}
	}
	return true
}

// restore fills in what phases leave to the line and to their clocks.
func (l *Line) restore() error {
	for i := range l.Phases {
		p := &l.Phases[i]
		l.fill(p)
		if p.Clock.State == "" {
			p.Clock = PhaseClock{ID: l.Reference, State: clock.Identity, OffsetNS: new(int64), BoundNS: new(int64)}
		}
		c := converter{&p.Clock, l.StartNS}
		for _, list := range [...][]Stamp{p.Stamps, p.Transfer} {
			for j := range list {
				s := &list[j]
				if s.Raw != unread {
					continue
				}
				if p.Clock.OffsetNS == nil {
					return fmt.Errorf("%s of %s %s is converted without an offset", s.Name, p.Role, p.Node)
				}
				s.Raw = c.raw(*s.Ref)
			}
		}
	}
	return nil
}

func parseInts(r *jsonline.Reader) []int64 { return parseList(r, (*jsonline.Reader).Int) }

// parseColumns reads name -> list. Lists of unequal length are cut to the shortest, so that a row is one thing.
func parseColumns(r *jsonline.Reader) *Columns {
	if !r.Object() {
		return nil
	}
	c := new(Columns)
	shortest := -1
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		v := parseInts(r)
		c.Names = append(c.Names, key)
		c.Values = append(c.Values, v)
		if shortest < 0 || len(v) < shortest {
			shortest = len(v)
		}
	}
	for i := range c.Values {
		c.Values[i] = c.Values[i][:max(shortest, 0)]
	}
	return c
}

// fill gives p what it left to the line.
func (l *Line) fill(p *Phase) {
	peer, bytes := "", int64(0)
	if len(p.Transfer) > 0 {
		peer, bytes = l.transferOf(p)
	}
	if p.Disagg == ofLine {
		p.Disagg = l.DisaggRequestID
	}
	if p.Peer == peerOfLine {
		p.Peer = peer
	}
	if p.Bytes == ofLine {
		p.Bytes = bytes
	}
	if p.Iters == itersOfChunks {
		p.Iters = itersOf(p)
	}
	if p.Tokens.Prompt == ofLine {
		p.Tokens = phase.Tokens{}
		if p.Role == phase.Disagg {
			p.Tokens = l.Tokens
		}
	}
}

// parseDecision reads the member "decision".
func parseDecision(r *jsonline.Reader) *phase.Decision {
	if !r.Object() {
		return nil
	}
	d := new(phase.Decision)
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		if key == "candidates" {
			d.Candidates = parseCandidates(r)
		} else {
			phase.ParseChoice(r, d, key)
		}
	}
	return d
}

// parseCandidates reads columns; the one of nodes says how many there are.
func parseCandidates(r *jsonline.Reader) (list []phase.Candidate) {
	if !r.Object() {
		return nil
	}
	nodes := 0
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		set := candidateColumn(r, key)
		if set == nil {
			r.Skip()
			continue
		}
		if !r.Array() {
			continue
		}
		i := 0
		for ; r.Item(); i++ {
			if i == len(list) {
				list = append(list, phase.Candidate{})
			}
			if !r.Null() {
				set(&list[i])
			}
		}
		if key == "node" {
			nodes = i
		}
	}
	if nodes == 0 {
		return nil
	}
	return list[:nodes]
}

// candidateColumn gives what reads a value of a column. nil: it is not known.
func candidateColumn(r *jsonline.Reader, name string) func(*phase.Candidate) {
	switch name {
	case "node":
		return func(c *phase.Candidate) { c.Node = r.String() }
	case "score":
		return func(c *phase.Candidate) { c.Score = r.Float() }
	}
	for i := range candidateColumns {
		if col := &candidateColumns[i]; col.name == name {
			return func(c *phase.Candidate) { col.set(c, r.Int()) }
		}
	}
	return nil
}
