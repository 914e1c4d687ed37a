package proxy

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"meridian.internal/router/pool"
	"meridian.internal/router/upstream"
	"meridian.internal/shared/api"
	"meridian.internal/shared/jsonline"
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
	a.genLeg0 = a.leg(a.choice.Gen)
	a.genLeg = &a.genLeg0
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
func (a *attempt) leg(l *pool.Lease) phase.Leg {
	return phase.Leg{
		Role: phase.Role(l.Role), Node: l.Name, Sub: a.sub.index, Attempt: a.n, Records: !l.Foreign && !a.s.p.o.NoBus, Given: a.had,
	}
}

// send posts a leg, whose body is used up; a status other than 200 is an error in the node's own words.
func (a *attempt) send(ctx context.Context, stage string, l *pool.Lease, b body, leg *phase.Leg) (*upstream.Response, *api.Error) {
	l.Sent()
	tail := len(*b.text)
	*b.text = a.header(*b.text)
	if stage == "gen" && a.style == GenerationFirst {
		*b.text = append(*b.text, api.HeaderKVWait+": "+kvWaitMS+"\r\n"...)
	}
	t1 := a.s.p.o.Steady.Now()
	res, err := a.s.p.o.Client.Do(ctx, &upstream.Request{URL: l.URL, Path: a.path(), Header: (*b.text)[tail:], Body: b.open, Tail: (*b.text)[:tail], Foreign: l.Foreign})
	b.release()
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
	if e.Code != res.Status {
		e.Message = roleWord(stage) + " node " + l.Name + ": " + e.Message
	}
	if n, err := strconv.Atoi(res.RetryAfter); err == nil && n > 0 && n < 3600 {
		e.RetryAfter = time.Duration(n) * time.Second
	} else if e.Code == http.StatusTooManyRequests || e.Code == http.StatusServiceUnavailable {
		e.RetryAfter = retryAfter // it said nothing that a client could go by
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

// common appends the members that both legs change: one choice, its own seed, and the prompt of the sub-request.
func (a *attempt) common(set []api.Set) []api.Set {
	req, b := a.s.req, a.sub
	foreign := a.choice.Gen.Foreign
	set = append(set, api.Set{Key: "n", Value: one(req.N)})
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
	if a.s.unpinned {
		set = append(set, api.Set{Key: "prompt_cache_retention", Value: []byte(`"in_memory"`)})
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
func (a *attempt) base() [][]byte {
	if a.open == nil {
		var set [maxSet]api.Set
		a.open = a.openBody(a.common(set[:0]))
	}
	return a.open
}

// maxSet is room for all that legs change.
const maxSet = 12

func (a *attempt) openBody(set []api.Set) [][]byte {
	for _, own := range []string{"stream", "stream_options", "disaggregated_params"} {
		set = append(set, api.Set{Key: own})
	}
	return a.s.req.AppendOpen(nil, set)
}

// body is a leg's body: what both legs have, in pieces, since a long prompt is not copied, and its own tail.
type body struct {
	open [][]byte
	text *[]byte // the tail, in memory of texts
}

// texts are what a leg has of its own, the tail of its body and its header lines, until it is sent.
var texts = sync.Pool{New: func() any { b := make([]byte, 0, textBytes); return &b }}

const (
	textBytes = 1 << 10  // room for those of most legs
	keepText  = 64 << 10 // larger memory is left to the collector
)

// begin is a body with a tail that begins so.
func begin(open [][]byte, tail string) body {
	b := body{open, texts.Get().(*[]byte)}
	*b.text = append((*b.text)[:0], tail...)
	return b
}

func (b body) release() {
	if cap(*b.text) <= keepText {
		texts.Put(b.text)
	}
}

// Tails of legs begin so. What follows disaggregatedKey is their own.
const (
	genTail          = `,"stream":true,"stream_options":{"include_usage":true}`
	ctxTail          = `,"stream":false`
	disaggregatedKey = `,"disaggregated_params":`
)

// usageBytes is room for a usage object.
const usageBytes = 160

// closed is the body with its whole tail and its brace.
func (b body) closed(tail []byte) body {
	*b.text = append(tail, '}')
	return b
}

func ctxBody(open [][]byte, id int64, style int) body {
	b := begin(open, ctxTail+disaggregatedKey)
	return b.closed(api.LegParams{Type: api.ContextOnly, ID: id, Style: style}.Append(*b.text))
}

// aloneBody names the peer from which the only node fetches cached KV, where there is one.
func (a *attempt) aloneBody() body {
	b := begin(a.base(), genTail)
	tail := *b.text
	if a.choice.Lender != "" {
		tail = append(tail, disaggregatedKey+`{"request_type":"`+api.ContextAndGeneration+`","ctx_info_endpoint":`...)
		tail = append(jsonline.AppendString(tail, "tcp://"+a.choice.Lender), '}')
	}
	return b.closed(tail)
}

func (a *attempt) genFirstBody() body {
	b := begin(a.base(), genTail+disaggregatedKey)
	return b.closed(api.LegParams{
		Type: api.GenerationOnly, ID: a.id, CtxID: a.id, Style: api.GenerationFirst, Endpoint: "tcp://" + a.choice.Ctx.KVAddr,
	}.Append(*b.text))
}

// genBodyAfter makes the generation leg of what the context leg answered. The worker's own members are copied as sent.
func (a *attempt) genBodyAfter(ans *api.CtxAnswer) (body, *api.Error) {
	bad := func(what string) (body, *api.Error) {
		return body{}, api.Failed("ctx", true, "context node %s: its answer %s", a.choice.Ctx.Name, what)
	}
	var few [16]api.Field
	fields, err := api.SplitObject(few[:0], ans.Choices[0].Disagg)
	if err != nil {
		return bad("has no disaggregated_params")
	}
	for _, name := range []string{"ctx_request_id", "disagg_request_id"} {
		if !present(fields, name) {
			return bad("lacks disaggregated_params." + name)
		}
	}
	set := append(make([]api.Set, 0, 3), afterContext[:]...)
	if ans.Usage != nil {
		set = append(set, api.Set{Key: "ctx_usage", Value: api.AppendUsage(make([]byte, 0, usageBytes), *ans.Usage)})
	}
	open := a.base()
	if a.sub.ids == nil && len(ans.PromptTokenIDs) > 0 && string(ans.PromptTokenIDs) != "null" {
		var own [maxSet]api.Set
		open = a.openBody(replace(a.common(own[:0]), a.promptKey(), ans.PromptTokenIDs))
	}
	b := begin(open, genTail+disaggregatedKey)
	return b.closed(api.AppendPatched(*b.text, fields, set)), nil
}

// afterContext is what every generation leg says whose context leg was first.
var afterContext = [...]api.Set{
	{Key: "request_type", Value: []byte(`"` + api.GenerationOnly + `"`)},
	{Key: "schedule_style", Value: []byte{'0' + api.ContextFirst}},
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
