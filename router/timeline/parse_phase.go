package timeline

import (
	"meridian.internal/shared/clock"
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/phase"
)

func parsePhase(r *jsonline.Reader) (p Phase) {
	if !r.Object() {
		return p
	}
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		if !phaseIdentity(r, key, &p) && !phaseBody(r, key, &p) {
			r.Skip()
		}
	}
	for _, list := range [][]Stamp{p.Stamps, p.Transfer} {
		for i := range list {
			list[i].Raw += p.RawStartNS
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
	case "raw_start_ns":
		p.RawStartNS = r.Int()
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
	case "stamps":
		p.Stamps = parsePairs(r)
	case "transfer":
		p.Transfer = parsePairs(r)
	case "tokens":
		p.Tokens = phase.ParseTokens(r)
	case "kv":
		p.KV = phase.ParseKV(r)
	case "chunks":
		p.Chunks = parseColumns(r)
	case "steps":
		p.Steps = parseColumns(r)
	case "step_messages":
		p.StepMessages = int(r.Int())
	case "truncated":
		p.Truncated = r.Int()
	case "iters":
		if v := parseInts(r); len(v) == 2 {
			p.Iters = &phase.Iters{First: v[0], Last: v[1]}
		}
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

// parsePairs reads name -> [raw, converted or null].
func parsePairs(r *jsonline.Reader) []Stamp {
	if !r.Object() {
		return nil
	}
	list := []Stamp{}
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		s := Stamp{Name: key}
		if r.Array() {
			for n := 0; r.Item(); n++ {
				switch n {
				case 0:
					s.Raw = r.Int()
				case 1:
					s.Ref = r.IntPtr()
				default:
					r.Skip()
				}
			}
		}
		list = append(list, s)
	}
	return list
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
