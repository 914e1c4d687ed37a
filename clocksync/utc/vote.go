package utc

import "slices"

// interval is what one server proves of UTC - steady.
type interval struct{ lo, up int64 }

// vote is Marzullo's: the smallest interval that lies in as many of the given ones as possible. It is an answer only when
// more than half of all servers that are configured agree on it: then at most a minority lies.
func vote(in []interval, configured int) (out interval, agree int, ok bool) {
	type edge struct {
		at   int64
		open bool
	}
	var es []edge
	for _, i := range in {
		es = append(es, edge{i.lo, true}, edge{i.up, false})
	}
	slices.SortFunc(es, func(a, b edge) int {
		switch {
		case a.at != b.at && a.at < b.at, a.at == b.at && a.open && !b.open: // intervals that touch overlap
			return -1
		case a.at == b.at && a.open == b.open:
			return 0
		}
		return 1
	})
	depth := 0
	for k, e := range es {
		if !e.open {
			depth--
			continue
		}
		depth++
		if depth > agree {
			agree = depth
			out = interval{e.at, es[k+1].at}
		}
	}
	return out, agree, agree >= configured/2+1
}

// contains says whether a server is one of those that agree.
func (i interval) contains(o interval) bool { return i.lo <= o.lo && o.up <= i.up }
