package worker

import (
	"context"
	"time"

	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// Sequence is a running request of an engine. Those of gpu/ranks are such.
type Sequence interface {
	// Next waits for tokens and gives all since the last call; Done once, with the last ones. After ctx ended the
	// sequence still runs: Cancel ends it.
	Next(ctx context.Context) ([]infer.Token, *infer.Done, error)
	// Cancel asks for the end; Next then gives Done.
	Cancel()
}

// Runner starts a leg. An error before Leg.Flush becomes a status, one from Next after it an error event.
type Runner func(ctx context.Context, l *Leg) (Sequence, error)

// Leg is one sequence that a node was asked for: a choice of a direct request, or a context or generation leg. A Runner
// may call its methods and set the fields that say so.
type Leg struct {
	Request infer.Request
	Disagg  *api.DisaggParams // nil: none was given
	Style   string            // generation_first, context_first, aggregated
	Limit   time.Duration     // what is left of the request's time; 0: no limit was given
	KVWait  time.Duration     // how long to wait for another source when the KV breaks off

	Answer   *api.DisaggParams   // set by a Runner: disaggregated_params of the choice
	Transfer *phase.Transfer     // set by a Runner: the hand-over as this side saw it, once it is known
	Held     *infer.Report       // set by a Runner: what its place and blocks cost, should the sequence never start
	Handle   int64               // set by a Runner: the disagg_request_id under which the KV came, if it is not the leg's own
	Taken    int                 // set by a Runner: first tokens that another node sampled; the record counts them there
	Settle   func() *phase.Error // set by a Runner: waits for what goes on after the answer, and fills Transfer; the record waits for it

	index    int // of the choice
	now      func() int64
	admitted int64
	flushed  int64
	flush    func()
	usage    *api.Usage // ctx_usage
}

// Admitted stamps the moment in which slot and blocks were granted.
func (l *Leg) Admitted() {
	if l.now != nil { // nil in a leg that no face made
		l.admitted = l.now()
	}
}

// Flush sends the 200 and its headers now, if the answer is a stream: the other leg waits for it.
func (l *Leg) Flush() {
	if l.flush != nil {
		if l.flushed == 0 { // before the write: the router must not read it earlier than this
			l.flushed = l.now()
		}
		l.flush()
	}
}

// styleOf names the serving style of a leg.
func styleOf(d *api.DisaggParams) string {
	switch {
	case d == nil || d.RequestType == api.ContextAndGeneration:
		return "aggregated"
	case d.ScheduleStyle != nil && *d.ScheduleStyle == api.GenerationFirst:
		return "generation_first"
	}
	return "context_first"
}

// kindOf gives the engine's word for a request type.
func kindOf(d *api.DisaggParams) (infer.Kind, *api.Error) {
	if d == nil {
		return infer.Aggregated, nil
	}
	switch d.RequestType {
	case api.ContextAndGeneration:
		return infer.Aggregated, nil
	case api.ContextOnly:
		return infer.ContextOnly, nil
	case api.GenerationOnly:
		return infer.GenerationOnly, nil
	}
	return 0, api.Invalid("disaggregated_params.request_type", "request_type %q: want %s, %s or %s", d.RequestType,
		api.ContextOnly, api.GenerationOnly, api.ContextAndGeneration)
}
