package proxy

import (
	"context"
	"errors"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"meridian.internal/router/pool"
	"meridian.internal/router/upstream"
	"meridian.internal/shared/api"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/sse"
)

const (
	maxCtxAnswer = 64 << 20 // it repeats the prompt's ids
	maxErrorBody = 64 << 10
)

// openGen sends the generation leg (or the only leg) and waits for its 200: the node has admitted the request.
func (a *attempt) openGen(ctx context.Context, b body) *api.Error {
	a.stamps.GenDispatchNS = a.stamp(&a.times.genDispatch)
	a.genLeg = a.leg(a.choice.Gen)
	res, e := a.send(ctx, "gen", a.choice.Gen, b, a.genLeg)
	if e != nil {
		return e
	}
	a.stamps.GenHeadersNS = a.stamp(&a.times.genHeaders)
	if !strings.HasPrefix(res.ContentType, sse.ContentType) {
		_ = res.Close()
		return api.Failed("gen", true, "generation node %s answered with %q, not a stream", a.choice.Gen.Name, res.ContentType)
	}
	a.gen = res
	return nil
}

// leg describes a leg for the record.
func (a *attempt) leg(l *pool.Lease) *phase.Leg {
	return &phase.Leg{
		Role: phase.Role(l.Role), Node: l.Name, Sub: a.sub.index, Attempt: a.n, Records: !l.Foreign && !a.s.p.o.NoBus, Given: a.had,
	}
}

// send posts a leg; a status other than 200 is an error in the node's own words.
func (a *attempt) send(ctx context.Context, stage string, l *pool.Lease, b body, leg *phase.Leg) (*upstream.Response, *api.Error) {
	l.Sent()
	header := a.header()
	if stage == "gen" && a.style == GenerationFirst {
		header = append(header, api.HeaderKVWait+": "+kvWaitMS+"\r\n"...)
	}
	t1 := a.s.p.o.Steady.Now()
	res, err := a.s.p.o.Client.Do(ctx, &upstream.Request{URL: l.URL, Path: a.path(), Header: header, Body: b.open, Tail: b.tail, Foreign: l.Foreign})
	if err == nil && res.Clock != "" {
		a.s.p.exchanged(l, res.Clock, t1)
	}
	if err != nil {
		if errors.Is(err, upstream.ErrNotSent) {
			leg.Records = false
		}
		return nil, a.broken(ctx, stage, l, err)
	}
	if res.Status == 200 {
		return res, nil
	}
	defer res.Close()
	text, err := res.ReadAll(maxErrorBody)
	if err != nil {
		return nil, a.broken(ctx, stage, l, err)
	}
	e := api.ParseError(res.Status, text, stage)
	e.Stage = stageOf(e.Stage, stage)
	if n, err := strconv.Atoi(res.RetryAfter); err == nil && n > 0 && n < 3600 {
		e.RetryAfter = time.Duration(n) * time.Second
	}
	return nil, e
}

// stageOf keeps a node's own word where it says more than which leg it was.
func stageOf(said, leg string) string {
	if said == "kv" || said == "parse" {
		return said
	}
	return leg
}

// broken explains a transport error: the cause for which the legs were stopped, or that the node could not be reached.
func (a *attempt) broken(ctx context.Context, stage string, l *pool.Lease, err error) *api.Error {
	if ctx.Err() != nil {
		return stopCause(ctx)
	}
	l.Unreachable()
	a.broke.Store(true)
	a.s.p.o.Logger.Warn("leg failed", "request_id", a.s.id, "stage", stage, "node", l.Name, "error", err)
	return api.Failed(stage, true, "%s node %s: %s", roleWord(stage), l.Name, reason(err))
}

// reason is a transport error without addresses.
func reason(err error) string {
	var op *net.OpError
	switch {
	case errors.Is(err, upstream.ErrProtocol):
		return "it answered with something that is not HTTP"
	case errors.Is(err, os.ErrDeadlineExceeded):
		return "it did not answer in time"
	case errors.As(err, &op) && op.Op == "dial":
		return "it could not be reached"
	default:
		return "the connection broke"
	}
}

// common are the members that both legs change: one choice, its own seed, and the prompt of the sub-request.
func (a *attempt) common() []api.Set {
	req, b := a.s.req, a.sub
	foreign := a.choice.Gen.Foreign
	set := append(make([]api.Set, 0, 12), api.Set{Key: "n", Value: one(req.N)})
	if !foreign || req.SeedSet {
		seed := a.s.seed + uint64(b.index%req.N)
		if req.SeedSet && int64(req.Sampling.Seed) < 0 { // it was sent signed
			set = append(set, api.Set{Key: "seed", Value: strconv.AppendInt(nil, int64(seed), 10)})
		} else {
			set = append(set, api.Set{Key: "seed", Value: strconv.AppendUint(nil, seed, 10)})
		}
	}
	if a.s.lowered {
		set = append(set, api.Set{Key: "priority", Value: strconv.AppendInt(nil, int64(req.Priority), 10)})
	}
	if len(b.given) > 0 {
		set = append(set, api.Set{Key: "output_token_ids", Value: api.AppendIDs(nil, b.given)})
	}
	switch {
	case req.Chat && b.ids != nil:
		set = append(set, api.Set{Key: "prompt_token_ids", Value: b.idsJSON()})
	case b.prompt != nil:
		set = append(set, api.Set{Key: "prompt", Value: b.prompt})
	}
	return set
}

// idsJSON is made once; both legs and all attempts send it.
func (b *sub) idsJSON() []byte {
	if b.prompt == nil {
		b.prompt = api.AppendIDs(nil, b.ids)
	}
	return b.prompt
}

// one drops n where it is 1 already, so that a body without n stays without it.
func one(n int) []byte {
	if n == 1 {
		return nil
	}
	return []byte("1")
}

// base is what both legs have in common; each has its own tail.
func (a *attempt) base() []byte {
	if a.open == nil {
		a.open = a.openBody(a.common())
	}
	return a.open
}

func (a *attempt) openBody(set []api.Set) []byte {
	for _, own := range []string{"stream", "stream_options", "disaggregated_params"} {
		set = append(set, api.Set{Key: own})
	}
	return a.s.req.AppendOpen(nil, set)
}

// body is a leg's body in two parts, so that a long prompt is not copied.
type body struct{ open, tail []byte }

// tailBytes is room for what most legs have of their own.
const tailBytes = 512

// genTail ends the body of a generation leg; params nil: it is the only leg.
func genTail(params []byte) []byte {
	b := append(make([]byte, 0, tailBytes), `,"stream":true,"stream_options":{"include_usage":true}`...)
	if params != nil {
		b = append(append(b, `,"disaggregated_params":`...), params...)
	}
	return append(b, '}')
}

func (a *attempt) genBody(params []byte) body { return body{a.base(), genTail(params)} }

func ctxBody(open []byte, id int64, style int) body {
	b := append(make([]byte, 0, tailBytes), `,"stream":false,"disaggregated_params":`...)
	b = api.LegParams{Type: api.ContextOnly, ID: id, Style: style}.Append(b)
	return body{open, append(b, '}')}
}

// aloneParams names the peer from which the only node fetches cached KV; nil where it fetches none.
func (a *attempt) aloneParams() []byte {
	if a.choice.Lender == "" {
		return nil
	}
	b := append(make([]byte, 0, tailBytes), `{"request_type":"`+api.ContextAndGeneration+`","ctx_info_endpoint":`...)
	return append(api.AppendString(b, "tcp://"+a.choice.Lender), '}')
}

func (a *attempt) genFirstParams() []byte {
	return api.LegParams{
		Type: api.GenerationOnly, ID: a.id, CtxID: a.id, Style: api.GenerationFirst, Endpoint: "tcp://" + a.choice.Ctx.KVAddr,
	}.Append(make([]byte, 0, tailBytes))
}

// genBodyAfter makes the generation leg of what the context leg answered. The worker's own members are copied as sent.
func (a *attempt) genBodyAfter(ans *api.CtxAnswer) (body, *api.Error) {
	bad := func(what string) (body, *api.Error) {
		return body{}, api.Failed("ctx", true, "context node %s: its answer %s", a.choice.Ctx.Name, what)
	}
	fields, err := api.SplitObject(make([]api.Field, 0, 16), ans.Choices[0].Disagg)
	if err != nil {
		return bad("has no disaggregated_params")
	}
	for _, name := range []string{"ctx_request_id", "disagg_request_id"} {
		if !present(fields, name) {
			return bad("lacks disaggregated_params." + name)
		}
	}
	set := []api.Set{
		{Key: "request_type", Value: []byte(`"` + api.GenerationOnly + `"`)},
		{Key: "schedule_style", Value: strconv.AppendInt(nil, api.ContextFirst, 10)},
	}
	if ans.Usage != nil {
		set = append(set, api.Set{Key: "ctx_usage", Value: api.AppendUsage(nil, *ans.Usage)})
	}
	open := a.base()
	if a.sub.ids == nil && len(ans.PromptTokenIDs) > 0 && string(ans.PromptTokenIDs) != "null" {
		open = a.openBody(replace(a.common(), a.promptKey(), ans.PromptTokenIDs))
	}
	params := make([]byte, 0, len(ans.Choices[0].Disagg)+tailBytes)
	return body{open, genTail(api.AppendPatched(params, fields, set, false))}, nil
}

func (a *attempt) promptKey() string {
	if a.s.req.Chat {
		return "prompt_token_ids"
	}
	return "prompt"
}

func replace(set []api.Set, key string, value []byte) []api.Set {
	for i := range set {
		if set[i].Key == key {
			set[i].Value = value
			return set
		}
	}
	return append(set, api.Set{Key: key, Value: value})
}

func present(fields []api.Field, name string) bool {
	for _, f := range fields {
		if string(f.Key) == name && string(f.Value) != "null" {
			return true
		}
	}
	return false
}
