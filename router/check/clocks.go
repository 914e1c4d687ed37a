package check

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"meridian.internal/clocksync/closure"
	"meridian.internal/router/timeline"
)

// Clocks holds the messages of many requests against each other: what one request cannot tell, whose clock is wrong when
// two contradict, many can. It keeps one number for each pair of nodes. The zero value is ready; it belongs to one goroutine.
//
// A clock whose estimate is right has stamps that are right to their bounds. So a message that was received before it was
// sent by more than both bounds contradicts the two clocks, and a clock that is off by a constant explains all messages
// that contradict, in either direction and with every peer.
type Clocks struct {
	routers map[string]map[direction]proof
}

// maxDirections that a router's messages have are kept: records may name nodes that there are not, and a verdict costs the square
// of their number.
const maxDirections = 4096

// direction is from one node to another.
type direction struct{ from, to string }

// proof is what the messages of a direction prove together.
type proof struct {
	ns           int64 // the most that one was received too early by, beyond the bounds; negative: none was
	contradicted int64 // messages that were
}

// Verdict is what is wrong with the clocks that were seen by one router.
type Verdict struct {
	Router   string
	Liars    []string // one: its clock is wrong; several: one of these; none: more than one of Clocks
	Clocks   []string // that contradict each other; "" is the router's
	ExcessNS int64    // by so much, beyond all bounds
	Messages int64    // that contradict
}

// Add takes the messages of a line and counts those that contradict.
func (c *Clocks) Add(l *timeline.Line) (contradicted int64) {
	l.Links(func(k timeline.Link) {
		pairs := c.routers[l.Router]
		if pairs == nil {
			if c.routers == nil {
				c.routers = map[string]map[direction]proof{}
			}
			pairs = map[direction]proof{}
			c.routers[l.Router] = pairs
		}
		d := direction{k.From, k.To}
		p, seen := pairs[d]
		if !seen && len(pairs) >= maxDirections {
			return
		}
		ns := k.SentNS - k.ReceivedNS - k.BoundNS
		if !seen || ns > p.ns {
			p.ns = ns
		}
		if ns > 0 {
			p.contradicted++
			contradicted++
		}
		pairs[d] = p
	})
	return contradicted
}

// Merge adds what another has seen.
func (c *Clocks) Merge(o *Clocks) {
	for router, pairs := range o.routers {
		if c.routers == nil {
			c.routers = map[string]map[direction]proof{}
		}
		if c.routers[router] == nil {
			c.routers[router] = map[direction]proof{}
		}
		for d, p := range pairs {
			old, seen := c.routers[router][d]
			if seen {
				p.ns, p.contradicted = max(p.ns, old.ns), p.contradicted+old.contradicted
			}
			c.routers[router][d] = p
		}
	}
}

// Verdicts judges what was added, router by router; nothing if no message contradicts.
func (c *Clocks) Verdicts() (out []Verdict) {
	for _, router := range slices.Sorted(maps.Keys(c.routers)) {
		if v, bad := judge(c.routers[router]); bad {
			v.Router = router
			out = append(out, v)
		}
	}
	return out
}

func judge(pairs map[direction]proof) (Verdict, bool) {
	names := map[string]bool{}
	var v Verdict
	var messages []closure.Message
	for d, p := range pairs {
		names[d.from], names[d.to] = true, true
		v.Messages += p.contradicted
		messages = append(messages, closure.Message{From: d.from, To: d.to, SentNS: p.ns})
	}
	if v.Messages == 0 {
		return Verdict{}, false
	}
	delete(names, timeline.Reference)
	var clocks []closure.Clock // the bounds are in the messages
	for _, n := range slices.Sorted(maps.Keys(names)) {
		clocks = append(clocks, closure.Clock{Name: n})
	}
	r := closure.Close(clocks, messages)
	v.Liars, v.Clocks, v.ExcessNS = r.Liars, r.Cycle, r.ExcessNS
	return v, true
}

// String is a sentence.
func (v Verdict) String() string {
	by := fmt.Sprintf("by at least %.3f ms more than the clock bounds allow (%d messages)", float64(v.ExcessNS)/1e6, v.Messages)
	switch len(v.Liars) {
	case 1:
		return fmt.Sprintf("the clock of %s is wrong %s: it alone explains every message that was received before it was sent", v.Liars[0], by)
	case 0:
		return fmt.Sprintf("the clocks of %s contradict each other %s, and no single one explains it: more than one is wrong", v.list(v.Clocks), by)
	}
	return fmt.Sprintf("the clock of one of %s is wrong %s: too few nodes exchange messages to say which", v.list(v.Liars), by)
}

func (v Verdict) list(names []string) string {
	names = slices.Clone(names)
	for i, n := range names {
		if n == timeline.Reference {
			names[i] = v.Router
		}
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), ", ")
}
