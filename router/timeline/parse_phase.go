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
		parsePhaseClock(r, p)
	case "rank_clock":
		p.Rank = parseRankClock(r)
	case "peer":
		p.Peer = r.String()
	case "bytes":
		p.Bytes = r.Int()
	case "fetched_tokens":
		p.Fetched = int(r.Int())
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
		p.Tokens = parseTokens(r)
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
		p.Chunks = parseChunks(r)
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
	case "pushed_offset_ns": // before it was in the clock's row
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

// parsePhaseClock reads the row of a clock, or the object that lines had before.
func parsePhaseClock(r *jsonline.Reader, p *Phase) {
	if r.Next() == '[' {
		parseClockRow(r, p)
		return
	}
	c := &p.Clock
	if !r.Object() {
		return
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
}

func parseRankClock(r *jsonline.Reader) *RankClock {
	if !r.Array() {
		return nil
	}
	k := new(RankClock)
	for i := 0; r.Item(); i++ {
		switch i {
		case 0:
			k.ID = clock.ID(r.String())
		case 1:
			k.State = r.String()
		case 2:
			k.BoundNS = r.Int()
		case 3:
			k.OffsetNS = r.Int()
		default: // of a later version
			r.Skip()
		}
	}
	return k
}

func parseClockRow(r *jsonline.Reader, p *Phase) {
	c := &p.Clock
	r.Array()
	for i := 0; r.Item(); i++ {
		switch i {
		case 0:
			c.ID = clock.ID(r.String())
		case 1:
			c.State = r.String()
		case 2:
			c.BoundNS = r.IntPtr()
		case 3:
			c.OffsetNS = r.IntPtr()
		case 4:
			p.PushedNS = r.IntPtr()
		case 5:
			c.SkewPPB = r.Int()
		case 6:
			c.AtNS = r.Int()
		case 7:
			c.Via = r.String()
		default: // of a later version
			r.Skip()
		}
	}
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

// parseTokens reads prompt, cached and output.
func parseTokens(r *jsonline.Reader) (t phase.Tokens) {
	if !r.Array() {
		return t
	}
	for i := 0; r.Item(); i++ {
		switch i {
		case 0:
			t.Prompt, t.NoPrompt = phase.ParseCount(r)
		case 1:
			t.Cached, t.NoCached = phase.ParseCount(r)
		case 2:
			t.Output = int(r.Int())
		default:
			r.Skip()
		}
	}
	return t
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
				if s.Raw != unread || s.Ref == nil { // without a converted stamp it is the raw one itself
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

// parseColumns reads name -> list.
func parseColumns(r *jsonline.Reader) *Columns {
	if !r.Object() {
		return nil
	}
	c := new(Columns)
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		c.Names = append(c.Names, key)
		c.Values = append(c.Values, parseInts(r))
	}
	c.cut()
	return c
}

// cut makes all lists as long as the shortest, so that a row is one thing.
func (c *Columns) cut() {
	shortest := 0
	for i, v := range c.Values {
		if i == 0 || len(v) < shortest {
			shortest = len(v)
		}
	}
	for i := range c.Values {
		c.Values[i] = c.Values[i][:shortest]
	}
}

// parseChunks reads the columns of chunks in their order, or with their names as lines had them before.
func parseChunks(r *jsonline.Reader) *Columns {
	c := &Columns{Names: chunkNames, Values: make([][]int64, len(chunkNames))}
	if r.Next() != '[' {
		named := parseColumns(r)
		for i, name := range chunkNames {
			c.Values[i] = named.Column(name)
		}
	} else {
		r.Array()
		for i := 0; r.Item(); i++ {
			if i < len(chunkNames) {
				c.Values[i] = parseInts(r)
			} else if cut := i - len(chunkNames); cut < 2*(infer.MaxStages-1) {
				c.addCut(cut, parseInts(r))
			} else { // of a later version
				r.Skip()
			}
		}
	}
	if c.cut(); len(c.Values[0]) == 0 {
		return nil
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

// parseCandidates reads columns in their order, or with their names as lines had them before. The one of nodes says how many
// candidates there are.
func parseCandidates(r *jsonline.Reader) []phase.Candidate {
	c := candidates{r: r}
	if r.Next() == '[' {
		r.Array()
		for i := 0; r.Item(); i++ {
			if i < len(candidateNames) {
				c.column(candidateNames[i])
			} else { // of a later version
				r.Skip()
			}
		}
	} else if r.Object() {
		for key, ok := r.Key(); ok; key, ok = r.Key() {
			c.column(key)
		}
	}
	if c.nodes == 0 {
		return nil
	}
	return c.list[:c.nodes]
}

// candidates are read column by column.
type candidates struct {
	r     *jsonline.Reader
	list  []phase.Candidate
	nodes int
}

func (c *candidates) column(name string) {
	set := c.setter(name)
	if set == nil {
		c.r.Skip()
		return
	}
	if !c.r.Array() {
		return
	}
	i := 0
	for ; c.r.Item(); i++ {
		if i == len(c.list) {
			c.list = append(c.list, phase.Candidate{})
		}
		if !c.r.Null() {
			set(&c.list[i])
		}
	}
	if name == "node" {
		c.nodes = i
	}
}

// setter gives what reads a value of a column. nil: it is not known.
func (c *candidates) setter(name string) func(*phase.Candidate) {
	switch name {
	case "node":
		return func(x *phase.Candidate) { x.Node = c.r.String() }
	case "score":
		return func(x *phase.Candidate) { x.Score = c.r.Float() }
	}
	for i := range candidateColumns {
		if col := &candidateColumns[i]; col.name == name {
			return func(x *phase.Candidate) { col.set(x, c.r.Int()) }
		}
	}
	return nil
}
