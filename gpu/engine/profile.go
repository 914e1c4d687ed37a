package engine

import (
	"context"
	"fmt"

	"meridian.internal/gpu/profile"
	"meridian.internal/gpu/sched"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

// StartProfile opens a profile window; see profile.Profiler. It causes no step.
func (e *Engine) StartProfile(ctx context.Context, r rows.ProfileRequest) (rows.ProfileWindow, error) {
	if e.prof == nil {
		return rows.ProfileWindow{}, fmt.Errorf("%w: this engine has no profiler", rows.ErrProfileInvalid)
	}
	return e.prof.Start(ctx, r, e.onLoop)
}

// StopProfile ends the window and waits for its files; see profile.Profiler.
func (e *Engine) StopProfile(ctx context.Context) (rows.ProfileWindow, error) {
	if e.prof == nil {
		return rows.ProfileWindow{}, rows.ErrProfileNone
	}
	return e.prof.Stop(ctx, e.onLoop)
}

// onLoop runs f on the engine's goroutine and waits for it.
func (e *Engine) onLoop(ctx context.Context, f func(next int64, pending bool)) error {
	done := make(chan struct{})
	if !e.post(func() { f(e.iter+1, len(e.flights) > 0); close(done) }) {
		return ErrStopped
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// traced are the stamps of a step in a profile window.
type traced struct {
	on               bool
	planNS, submitNS int64
	layerNS          []int64
}

// trace prepares a step that was built for the profile window, if it is in one.
func (e *Engine) trace(f *flight, planNS int64) {
	f.traced = traced{planNS: planNS, layerNS: f.traced.layerNS[:0]}
	if planNS == 0 {
		return
	}
	var layers bool
	if f.traced.on, layers = e.prof.Built(e.iter); layers {
		inner := f.batch.LayerDone
		f.batch.LayerDone = func(end int) {
			f.traced.layerNS = append(f.traced.layerNS, e.cfg.Now())
			if inner != nil {
				inner(end)
			}
		}
	}
}

// traceEnd hands a collected step to the profile window.
func (e *Engine) traceEnd(f *flight, now int64) {
	if !f.traced.on {
		return
	}
	st, kv := &f.step.Stamps, e.pool.Stats()
	s := profile.Step{
		Iter: f.batch.Iter, PlanNS: f.traced.planNS, BuiltNS: f.builtNS, SubmitNS: f.traced.submitNS, CollectNS: now, EndNS: e.cfg.Now(),
		ForwardStartNS: st.ForwardStartNS, ForwardEndNS: st.ForwardEndNS, SampleEndNS: st.SampleEndNS,
		BatchSize: len(f.items), KVUsedBlocks: kv.Used + kv.Leased, LayerNS: append([]int64(nil), f.traced.layerNS...),
	}
	for _, stage := range f.step.Stages {
		s.Stages = append(s.Stages, profile.Interval{FromNS: stage.ForwardStartNS, ToNS: stage.ForwardEndNS})
	}
	for i := range f.items {
		if it := &f.items[i]; it.KVLen < it.Seq.Data.(*Sequence).target {
			s.ContextSeqs++
			s.ContextTokens += it.Tokens
		}
	}
	e.prof.Collected(s)
}

// traceRequest hands a request that has ended to the profile window.
func (e *Engine) traceRequest(s *Sequence, reason infer.FinishReason) {
	if e.prof.Planning() {
		e.prof.Ended(s.life(s.report.FinishedNS, reason))
	}
}

func (s *Sequence) life(now int64, reason infer.FinishReason) profile.Life {
	r := &s.report
	return profile.Life{
		ID: s.req.ID, QueuedNS: r.QueuedNS, ScheduledNS: r.FirstScheduledNS, FirstTokenNS: r.FirstTokenNS, EndNS: now,
		PromptTokens: r.PromptTokens, OutputTokens: r.OutputTokens, Reason: string(reason),
	}
}

// lives are the requests that have not ended.
func (e *Engine) lives() []profile.Life {
	var out []profile.Life
	now := e.cfg.Now()
	for _, list := range [][]*sched.Seq{e.sched.Running(), e.sched.Waiting()} {
		for _, q := range list {
			out = append(out, q.Data.(*Sequence).life(now, "running"))
		}
	}
	return out
}
