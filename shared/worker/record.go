package worker

import (
	"net/http"

	"meridian.internal/shared/api"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/ledger"
	"meridian.internal/shared/phase"
)

// newRecord begins the record of an attempt with what its headers say.
func (n *Node) newRecord(o origin) *phase.Record {
	rec := &phase.Record{
		Schema: phase.Schema, Role: n.o.Role, Node: n.o.Name, Instance: n.o.Steady.ID(), Router: o.router,
		RequestID: o.requestID, ClientRequestID: o.clientID, Sub: o.sub, Attempt: o.attempt, Traceparent: o.traceparent,
		Probe: o.probe, Style: "aggregated", Model: n.o.Model.Name,
		Clocks: []phase.Clock{{ID: n.o.Steady.ID(), Kind: "mono"}},
	}
	n.addCards(rec, n.o.Steady.ID())
	if ns, ok := n.o.Adjusted.Offset(o.receivedNS); ok {
		rec.PushedOffsetNS = &ns
	}
	rec.Stamps.ReceiveNS = &o.receivedNS
	return rec
}

// addCards adds the clocks of the cards that a process computes on, which has this clock.
func (n *Node) addCards(rec *phase.Record, process clock.ID) {
	if n.o.CardClocks == nil {
		return
	}
	for _, e := range n.o.CardClocks() {
		if e.Reference.Instance() == process.Instance() {
			e.Reference = process
			rec.Clocks = append(rec.Clocks, phase.Clock{ID: e.Local, Kind: "gpu", Estimate: &e})
		}
	}
}

// reject publishes the record of a request that was refused before it became a leg.
func (n *Node) reject(o origin, e *api.Error) *api.Error {
	rec := n.newRecord(o)
	rec.Outcome = phase.Rejected
	rec.Error = recordError(e)
	rec.Stamps.EndNS = stamp(n.o.Steady.Now())
	e.RequestID = o.requestID
	n.publish(rec, nil, ledger.Ended{Code: e.Status()})
	return e
}

// fill completes the record: the attempt has ended, its last bytes are about to be written.
func (a *attempt) fill() {
	if a.finished {
		return
	}
	a.finished = true
	rec := a.rec
	s := &rec.Stamps
	s.StartedNS = stamp(a.started)
	s.AdmittedNS, s.HeadersSentNS = stamp(a.leg.admitted), stamp(a.leg.flushed)
	s.FirstTokenNS, s.LastTokenNS, s.FirstTokenSentNS = stamp(a.firstNS), stamp(a.lastNS), stamp(a.sentNS)
	rec.Tokens = phase.Tokens{Prompt: len(a.leg.Request.Prompt), Output: max(0, a.tokens-a.leg.Taken)}
	switch {
	case a.done != nil && a.done.Report.QueuedNS != 0:
		a.fillReport(a.done.Report)
	case a.leg.Held != nil: // the engine held a place for it, and it never started
		a.fillReport(*a.leg.Held)
	}
	rec.Outcome, rec.FinishReason = phase.Finished, a.finish
	if a.failure != nil {
		rec.Outcome, rec.FinishReason = outcomeOf(a.failure, a.seq != nil), ""
		rec.Error = recordError(a.failure)
	}
	if a.leg.Handle != 0 {
		rec.DisaggRequestID = a.leg.Handle
	}
	s.EndNS = stamp(a.n.o.Steady.Now())
}

func (a *attempt) fillReport(r infer.Report) {
	rec, s := a.rec, &a.rec.Stamps
	s.QueuedNS, s.FirstScheduledNS = stamp(r.QueuedNS), stamp(r.FirstScheduledNS)
	if s.AdmittedNS == nil {
		s.AdmittedNS = stamp(r.QueuedNS)
	}
	if r.PromptTokens > 0 {
		rec.Tokens.Prompt = r.PromptTokens
	}
	rec.Tokens.Cached = r.CachedTokens
	rec.DPRank, rec.Preemptions, rec.PreemptedNS = r.Rank, r.Preemptions, r.PreemptedNS
	if f := a.n.o.RankClock; f != nil && r.Rank != nil {
		if e, ok := f(*r.Rank); ok {
			s.EngineClock = len(rec.Clocks)
			rec.Clocks = append(rec.Clocks, phase.Clock{ID: e.Local, Kind: "rank", Estimate: &e})
			a.n.addCards(rec, e.Local)
		}
	}
	rec.Chunks, rec.EnergyJ = r.Chunks, r.EnergyJ
	if r.QueuedNS != 0 {
		kv := r.KV
		rec.KV = &kv
	}
	if r.FirstScheduledNS != 0 {
		rec.Iters = &phase.Iters{First: r.FirstIter, Last: r.LastIter}
	}
}

// settle publishes the record: now, or once what goes on after the answer has ended.
func (a *attempt) settle() {
	a.fill()
	var steps *infer.StepRecords
	if a.done != nil {
		steps = a.done.Report.Steps
	}
	if a.leg.Settle == nil {
		a.rec.Transfer = a.leg.Transfer
		a.n.publish(a.rec, steps, a.ended())
		return
	}
	a.n.settling.Go(func() {
		fault := a.leg.Settle()
		a.rec.Transfer = a.leg.Transfer
		if fault != nil && a.rec.Outcome == phase.Finished {
			a.rec.Outcome, a.rec.Error = phase.Failed, fault
		}
		a.n.publish(a.rec, steps, a.ended())
	})
}

// ended is what the ledger is told besides the record.
func (a *attempt) ended() ledger.Ended {
	e := ledger.Ended{Tokens: &a.told, Code: http.StatusOK}
	if a.failure != nil {
		e.Code = a.failure.Status()
	}
	return e
}

// publish hands a record over. Monitoring never fails a request: a lost record is counted by the publisher.
func (n *Node) publish(rec *phase.Record, steps *infer.StepRecords, end ledger.Ended) {
	n.metrics.count(rec)
	n.o.Ledger.Observe(rec, end)
	if n.o.Publish == nil {
		return
	}
	if err := n.o.Publish(rec, steps); err != nil {
		n.o.Logger.Warn("record lost", "request_id", rec.RequestID, "error", err)
	}
}

func outcomeOf(e *api.Error, started bool) phase.Outcome {
	switch {
	case e.Type == api.TypeCancelled:
		return phase.Cancelled
	case e.Type == api.TypeTimeout:
		return phase.Expired
	case !started && e.Status() < 500, !started && e.Type == api.TypeOverloaded, !started && e.Type == api.TypeUnavailable:
		return phase.Rejected
	}
	return phase.Failed
}

func recordError(e *api.Error) *phase.Error {
	return &phase.Error{Stage: e.Stage, Type: e.Type, Message: e.Message, Retryable: e.Retryable}
}

// stamp gives nil for a point that was not reached.
func stamp(ns int64) *int64 {
	if ns == 0 {
		return nil
	}
	return &ns
}
