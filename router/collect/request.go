package collect

import (
	"time"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// request is what is known of one request so far. It belongs to Run.
type request struct {
	id       string
	parts    []timeline.Part
	steps    map[timeline.Key]*stepParts
	acks     []ack
	deadline time.Time // zero: none
	since    time.Time // of the last record
	done     bool      // written
	adopted  string    // see message
}

// stepParts gathers the step messages of one record.
type stepParts struct {
	of    int                  // parts, as their headers say
	parts map[int]*infer.Steps // by number: what a header claims costs nothing
}

// router says whether the router's own record is there.
func (r *request) router() bool {
	for i := range r.parts {
		if r.parts[i].Record.Role == phase.Disagg {
			return true
		}
	}
	return false
}

func (r *request) has(k timeline.Key) bool {
	for i := range r.parts {
		if timeline.KeyOf(r.parts[i].Record) == k {
			return true
		}
	}
	return false
}

// hasSteps says whether the steps of a record are joined to it, or it announced none.
func (r *request) hasSteps(k timeline.Key) bool {
	for i := range r.parts {
		if timeline.KeyOf(r.parts[i].Record) == k {
			return r.parts[i].Steps != nil || r.parts[i].Record.StepMessages == 0
		}
	}
	return false
}

// addSteps keeps a step message and, once all of a record are there, joins them to it.
func (r *request) addSteps(k timeline.Key, h phase.StepsHeader, s *infer.Steps) {
	if r.steps == nil {
		r.steps = map[timeline.Key]*stepParts{}
	}
	sp := r.steps[k]
	if sp == nil || sp.of != h.Parts {
		sp = &stepParts{of: h.Parts, parts: map[int]*infer.Steps{}}
		r.steps[k] = sp
	}
	if h.Part < min(h.Parts, maxStepParts) && sp.parts[h.Part] == nil {
		sp.parts[h.Part] = s
	}
}

// maxStepParts bounds what a step header may claim: 1,024 parts hold three million steps.
const maxStepParts = 1024

// joinSteps gives every record the steps that have all arrived, and says whether there were any.
func (r *request) joinSteps() (joined bool) {
	for i := range r.parts {
		p := &r.parts[i]
		if p.Record.StepMessages == 0 || p.Steps != nil {
			continue
		}
		sp := r.steps[timeline.KeyOf(p.Record)]
		if sp == nil || len(sp.parts) < p.Record.StepMessages || len(sp.parts) != sp.of {
			continue
		}
		all := new(infer.Steps)
		for i := range sp.of {
			all.Join(sp.parts[i])
		}
		p.Steps, joined = all, true
	}
	return joined
}

// queue is a first-in first-out queue of requests.
type queue struct {
	items []*request
	head  int
}

func (q *queue) push(r *request) { q.items = append(q.items, r) }

func (q *queue) front() *request {
	if q.head == len(q.items) {
		return nil
	}
	return q.items[q.head]
}

// empty says that every request in the queue is written; it lets those at the front go.
func (q *queue) empty() bool {
	for r := q.front(); r != nil && r.done; r = q.front() {
		q.pop()
	}
	return q.front() == nil
}

func (q *queue) pop() {
	q.items[q.head] = nil
	q.head++
	if q.head > 1024 && q.head*2 > len(q.items) {
		q.items = append(q.items[:0:0], q.items[q.head:]...)
		q.head = 0
	}
}

// keep lets all go but those that f wants.
func (q *queue) keep(f func(*request) bool) {
	kept := q.items[:0]
	for _, r := range q.items[q.head:] {
		if f(r) {
			kept = append(kept, r)
		}
	}
	clear(q.items[len(kept):])
	q.items, q.head = kept, 0
}
