package utc

import "slices"

// interval is what one server proves of UTC - steady.
type interval struct{ lo, up int64 }

// election is what the servers say together.
type election struct {
	won   interval // Marzullo's: the smallest interval that lies in as many of the given ones as possible, and in agree of them
	agree int
	// bound is from the first to the last moment that more than half of all servers hold possible. If at most a minority lies, the
	// truth is within it; it need not be within won, which a liar that meets the others makes narrower.
	bound interval
}

// vote is an answer only when more than half of all servers that are configured agree: then at most a minority lies.
func vote(in []interval, configured int) (out election, ok bool) {
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
	depth, majority := 0, configured/2+1
	for k, e := range es {
		if !e.open {
			if depth == majority {
				out.bound.up = e.at
			}
			depth--
			continue
		}
		depth++
		if depth == majority && out.agree < majority {
			out.bound.lo = e.at
		}
		if depth > out.agree {
			out.agree = depth
			out.won = interval{e.at, es[k+1].at}
		}
	}
	return out, out.agree >= majority
}

// contains says whether a server is one of those that agree.
func (i interval) contains(o interval) bool { return i.lo <= o.lo && o.up <= i.up }
