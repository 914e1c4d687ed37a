// Package pipeline makes one back end of several that each own some of the layers: a step goes from stage to stage, and while
// one stage runs it the others run the steps before and after. It owns the way of hidden states and the splitting of KV copies;
// which sequences are in which step is gpu/sched's decision.
//
// Each stage has a goroutine that waits for its steps and hands them to the next; it ends with Close.
package pipeline

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"meridian.internal/gpu/backend"
)

// Pipeline implements backend.Backend.
type Pipeline struct {
	stages []backend.Backend
	info   backend.Info
	front  *backend.Queue[*job]
	links  []*backend.Queue[*job] // by stage: steps that it was given
	ended  sync.WaitGroup
	last   []int32 // by slot: the token that was sampled last; written by the last stage's goroutine, read when its steps are done
	copies sync.WaitGroup
}

// job is a step on its way.
type job struct {
	batch *backend.Batch
	step  *backend.Step  // of the whole
	here  *backend.Step  // at the stage that has it; nil once it has failed
	taken backend.Hidden // what that stage takes in; nil at the first
}

// New makes a pipeline of stages, which it closes. They own all layers of one model in order. It has as many KV blocks as the
// stage that has the fewest.
func New(stages ...backend.Backend) (*Pipeline, error) {
	if len(stages) == 0 {
		return nil, errors.New("pipeline: no stage")
	}
	info := stages[0].Info()
	for i, s := range stages {
		st := s.Info()
		switch {
		case i > 0 && st.Stage.First != info.Stage.End || i == 0 && st.Stage.First != 0:
			return nil, fmt.Errorf("pipeline: stage %d owns layers [%d, %d), the one before ends at %d", i, st.Stage.First, st.Stage.End, info.Stage.End)
		case st.ModelHash != info.ModelHash || st.TokensPerBlock != info.TokensPerBlock || st.MaxSlots != info.MaxSlots || st.KVType != info.KVType:
			return nil, fmt.Errorf("pipeline: stage %d is %+v, unlike the first, %+v", i, st, stages[0].Info())
		case len(st.Windows) > 0:
			return nil, fmt.Errorf("pipeline: stage %d has layers with windows: %w", i, errors.ErrUnsupported)
		}
		info.Stage.End = st.Stage.End
		info.KVBlocks = min(info.KVBlocks, st.KVBlocks)
	}
	if info.Stage.End != info.Layers {
		return nil, fmt.Errorf("pipeline: the stages end at layer %d of %d", info.Stage.End, info.Layers)
	}
	info.Stages = len(stages)
	p := &Pipeline{stages: stages, info: info, front: backend.NewQueue[*job](), last: make([]int32, info.MaxSlots)}
	for range stages {
		p.links = append(p.links, backend.NewQueue[*job]())
	}
	p.ended.Go(p.enter)
	for i := range stages {
		p.ended.Go(func() { p.pass(i) })
	}
	return p, nil
}

// Info implements backend.Backend.
func (p *Pipeline) Info() backend.Info { return p.info }

// Submit implements backend.Backend.
func (p *Pipeline) Submit(b *backend.Batch) *backend.Step {
	j := &job{batch: b, step: backend.NewStep(b.Iter)}
	if !p.front.Push(j) {
		j.step.Err = backend.ErrClosed
		j.step.Finish()
	}
	return j.step
}

// enter gives steps to the first stage.
func (p *Pipeline) enter() {
	var prev *job
	for {
		j, ok := p.front.Pop()
		if !ok {
			p.links[0].Close()
			return
		}
		p.resolve(j, prev)
		j.here = p.stages[0].Submit(j.batch)
		p.links[0].Push(j)
		prev = j
	}
}

// resolve fills in query tokens that an earlier step samples: only the last stage knows them, so that step must be done. Who
// wants the stages to work at the same time does not ask for that.
func (p *Pipeline) resolve(j, prev *job) {
	missing := func(e backend.Entry) bool { return e.Tokens == nil }
	if !slices.ContainsFunc(j.batch.Entries, missing) {
		return
	}
	if prev != nil {
		<-prev.step.Done()
	}
	b := *j.batch // the caller's stays as it is
	b.Entries = slices.Clone(b.Entries)
	for i := range b.Entries {
		if e := &b.Entries[i]; e.Tokens == nil && e.Slot >= 0 && e.Slot < len(p.last) {
			e.Tokens = []int32{p.last[e.Slot]}
		}
	}
	j.batch = &b
}

// pass waits for the steps of a stage in order and hands them to the next.
func (p *Pipeline) pass(i int) {
	for {
		j, ok := p.links[i].Pop()
		if !ok {
			if i+1 < len(p.links) {
				p.links[i+1].Close()
			}
			return
		}
		p.leave(j, i)
	}
}

// leave takes a step from a stage. One that has failed goes on without being run, so that steps end in order.
func (p *Pipeline) leave(j *job, i int) {
	last := i+1 == len(p.stages)
	if j.here != nil {
		<-j.here.Done()
		if j.taken != nil {
			j.taken.Release()
			j.taken = nil
		}
		j.step.Stages = append(j.step.Stages, j.here.Stamps)
		switch {
		case j.here.Err != nil:
			j.step.Err, j.here = fmt.Errorf("pipeline: stage %d: %w", i, j.here.Err), nil
		case !last:
			b := *j.batch
			b.Hidden, j.taken = j.here.Hidden, j.here.Hidden
			j.here = p.stages[i+1].Submit(&b)
		}
	}
	if !last {
		p.links[i+1].Push(j)
		return
	}
	p.finish(j)
}

func (p *Pipeline) finish(j *job) {
	s := j.step
	if s.Err == nil {
		s.Outputs = j.here.Outputs
		for i := range s.Outputs {
			if t := s.Outputs[i].Tokens; len(t) > 0 {
				p.last[j.batch.Entries[i].Slot] = t[len(t)-1]
			}
		}
	}
	if n := len(s.Stages); n > 0 {
		end := s.Stages[n-1]
		s.Stamps = backend.Stamps{ForwardStartNS: s.Stages[0].ForwardStartNS, ForwardEndNS: end.ForwardEndNS, SampleEndNS: end.SampleEndNS}
	}
	s.Finish()
}

// Close implements backend.Backend.
func (p *Pipeline) Close() error {
	p.front.Close()
	p.ended.Wait()
	var errs []error
	for _, s := range p.stages {
		errs = append(errs, s.Close())
	}
	p.copies.Wait()
	return errors.Join(errs...)
}
