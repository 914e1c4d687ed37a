package profile

import (
	"fmt"
	"strconv"
)

// Step is one iteration for the trace. Stamps are in ns of the steady clock; the device's may be of its own.
type Step struct {
	Iter                                                int64
	PlanNS, BuiltNS, SubmitNS, CollectNS, EndNS         int64 // host
	ForwardStartNS, ForwardEndNS, SampleEndNS           int64 // device
	BatchSize, ContextSeqs, ContextTokens, KVUsedBlocks int
	Stages                                              []Interval // forward of each stage of a pipeline; nil: there is one
	LayerNS                                             []int64    // when each layer was written; empty: not asked for
}

// Interval is a time on the device's timeline.
type Interval struct{ FromNS, ToNS int64 }

// Life is one request for the trace; 0 is a point that it did not reach.
type Life struct {
	ID                                         int64
	QueuedNS, ScheduledNS, FirstTokenNS, EndNS int64
	PromptTokens, OutputTokens                 int
	Reason                                     string
}

// maxSteps and maxLives bound what an open window keeps; what is over is counted.
const (
	maxSteps = 200_000
	maxLives = 200_000
)

// recording is what an open window has seen.
type recording struct {
	steps   []Step
	lives   []Life
	dropped int
}

func (r *recording) step(s Step) {
	if len(r.steps) >= maxSteps {
		r.dropped++
		return
	}
	r.steps = append(r.steps, s)
}

func (r *recording) life(l Life) {
	if len(r.lives) >= maxLives {
		r.dropped++
		return
	}
	r.lives = append(r.lives, l)
}

// The tracks of a trace. Iterations overlap their neighbours when the host works ahead, so they take turns on two.
const (
	trackEven = 1 + iota
	trackOdd
	trackPlan
	trackLaunch
	trackForward
	trackSample
	trackLayers
	// Of a pipeline, in which several iterations are on the device at the same time: one for each stage, whose gaps are its
	// bubbles, then as many for iterations.
	trackStages
)

func tracks() map[int]string {
	return map[int]string{
		trackEven: "iterations (even)", trackOdd: "iterations (odd)", trackPlan: "scheduler", trackLaunch: "launch",
		trackForward: "device forward", trackSample: "device sample", trackLayers: "device layers",
	}
}

// appendTrace writes a Chrome trace, which Perfetto loads too. Times are microseconds of the steady clock.
func appendTrace(b []byte, name string, rank int, r *recording, about string) []byte {
	b = append(b, `{"displayTimeUnit":"ms","metadata":{"complete":true,"dropped":`...)
	b = append(strconv.AppendInt(b, int64(r.dropped), 10), about...)
	b = append(b, "},\"traceEvents\":[\n"...)
	b = fmt.Appendf(b, `{"ph":"M","pid":%d,"name":"process_name","args":{"name":%q}}`, rank, name+" rank "+strconv.Itoa(rank))
	for tid := trackEven; tid <= trackLayers; tid++ {
		b = appendTrack(b, rank, tid, tracks()[tid])
	}
	for i, name := range r.pipeline() {
		b = appendTrack(b, rank, trackStages+i, name)
	}
	for i := range r.steps {
		b = appendStep(b, rank, &r.steps[i])
	}
	for i := range r.lives {
		b = appendLife(b, rank, &r.lives[i])
	}
	return append(b, "\n]}\n"...)
}

func appendTrack(b []byte, rank, tid int, name string) []byte {
	b = fmt.Appendf(b, ",\n"+`{"ph":"M","pid":%d,"tid":%d,"name":"thread_name","args":{"name":%q}}`, rank, tid, name)
	return fmt.Appendf(b, ",\n"+`{"ph":"M","pid":%d,"tid":%d,"name":"thread_sort_index","args":{"sort_index":%d}}`, rank, tid, tid)
}

// pipeline names the tracks of a pipeline.
func (r *recording) pipeline() (names []string) {
	stages := 0
	for i := range r.steps {
		stages = max(stages, len(r.steps[i].Stages))
	}
	for i := range stages {
		names = append(names, "stage "+strconv.Itoa(i))
	}
	for i := range stages {
		names = append(names, "micro-batch "+strconv.Itoa(i))
	}
	return names
}

// appendStages writes a step of a pipeline as far as its tracks are others.
func appendStages(b []byte, rank int, s *Step, name, args string) []byte {
	n := len(s.Stages)
	b = appendSlice(b, slice{rank, trackStages + n + int(s.Iter%int64(n)), name, s.BuiltNS, s.EndNS, args})
	for i, st := range s.Stages {
		b = appendSlice(b, slice{rank, trackStages + i, name, st.FromNS, st.ToNS, args})
	}
	return b
}

func appendStep(b []byte, rank int, s *Step) []byte {
	args := fmt.Sprintf(`{"iter":%d,"batch":%d,"context":%d,"context_tokens":%d,"kv_used_blocks":%d}`, s.Iter, s.BatchSize, s.ContextSeqs, s.ContextTokens, s.KVUsedBlocks)
	name := "iter " + strconv.FormatInt(s.Iter, 10)
	if len(s.Stages) > 0 {
		b = appendStages(b, rank, s, name, args)
	} else {
		b = appendSlice(b, slice{rank, trackEven + int(s.Iter%2), name, s.BuiltNS, s.EndNS, args})
	}
	iter := fmt.Sprintf(`{"iter":%d}`, s.Iter)
	for _, part := range []slice{
		{rank, trackPlan, "schedule", s.PlanNS, s.BuiltNS, iter},
		{rank, trackLaunch, "launch", s.BuiltNS, s.SubmitNS, iter},
		{rank, trackPlan, "update", s.CollectNS, s.EndNS, iter},
		{rank, trackSample, "sample " + name, s.ForwardEndNS, s.SampleEndNS, iter},
	} {
		b = appendSlice(b, part)
	}
	if len(s.Stages) > 0 {
		return b
	}
	b = appendSlice(b, slice{rank, trackForward, "forward " + name, s.ForwardStartNS, s.ForwardEndNS, args})
	from := s.ForwardStartNS
	for i, to := range s.LayerNS {
		if s.ForwardEndNS != 0 { // the host sees that a layer is written, at times after the device has gone on
			to = min(to, s.ForwardEndNS)
		}
		b = appendSlice(b, slice{rank, trackLayers, "layer " + strconv.Itoa(i), from, to, iter})
		from = to
	}
	return b
}

type slice struct {
	rank, track int
	name        string
	from, to    int64
	args        string
}

// appendSlice writes a slice; one whose ends were not measured, and an empty one, is left out.
func appendSlice(b []byte, s slice) []byte {
	if s.from == 0 || s.to <= s.from {
		return b
	}
	b = fmt.Appendf(b, ",\n"+`{"ph":"X","pid":%d,"tid":%d,"name":%q,"ts":`, s.rank, s.track, s.name)
	b = append(appendMicro(b, s.from), `,"dur":`...)
	return append(append(append(appendMicro(b, s.to-s.from), `,"args":`...), s.args...), '}')
}

func appendMicro(b []byte, ns int64) []byte {
	return strconv.AppendFloat(b, float64(ns/1000)+float64(ns%1000)/1000, 'f', 3, 64)
}

// appendLife writes a request as an asynchronous slice with its phases inside.
func appendLife(b []byte, rank int, l *Life) []byte {
	args := fmt.Sprintf(`{"request_id":"%d","prompt_tokens":%d,"output_tokens":%d,"end":%q}`, l.ID, l.PromptTokens, l.OutputTokens, l.Reason)
	id := strconv.FormatInt(l.ID, 10)
	of := async{rank, id}
	b = of.append(b, "request "+id, l.QueuedNS, l.EndNS, args)
	b = of.append(b, "queue", l.QueuedNS, first(l.ScheduledNS, l.EndNS), "{}")
	if l.ScheduledNS != 0 {
		b = of.append(b, "prefill", l.ScheduledNS, first(l.FirstTokenNS, l.EndNS), "{}")
	}
	if l.FirstTokenNS != 0 {
		b = of.append(b, "decode", max(l.FirstTokenNS, l.ScheduledNS), l.EndNS, "{}")
	}
	return b
}

func first(a, b int64) int64 {
	if a != 0 {
		return a
	}
	return b
}

// async are the spans of one request, which overlap those of others.
type async struct {
	rank int
	id   string
}

func (a async) append(b []byte, name string, from, to int64, args string) []byte {
	if from == 0 || to <= from {
		return b
	}
	for _, end := range []struct {
		phase string
		at    int64
	}{{"b", from}, {"e", to}} {
		b = fmt.Appendf(b, ",\n"+`{"ph":%q,"cat":"request","pid":%d,"id":%q,"name":%q,"ts":`, end.phase, a.rank, a.id, name)
		b = append(append(append(appendMicro(b, end.at), `,"args":`...), args...), '}')
		args = "{}"
	}
	return b
}
