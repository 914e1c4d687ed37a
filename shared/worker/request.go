package worker

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
)

// maxBody bounds a request's body; a prompt of a million token ids fits.
const maxBody = 16 << 20

// bodyTime is how long a body may take to come.
const bodyTime = 30 * time.Second

// call is one HTTP request and its legs.
type call struct {
	n       *Node
	o       origin
	r       *api.Request
	head    api.Head
	tries   []*attempt
	stream  bool
	prompts [][]int32
}

// readCall reads, validates and tokenizes a request.
func (n *Node) readCall(ctx context.Context, req *http.Request, o origin, chat bool) (*call, *api.Error) {
	body, err := io.ReadAll(io.LimitReader(req.Body, maxBody+1))
	if late := (*api.Error)(nil); errors.As(err, &late) {
		return nil, late
	}
	if err != nil {
		return nil, &api.Error{Code: statusClientGone, Type: api.TypeCancelled, Stage: "parse", Message: "read the body: " + err.Error()}
	}
	m := n.o.Model
	r, bad := api.ParseRequest(body, chat, api.Limits{
		MaxBody: maxBody, ContextLen: m.ContextLen, VocabSize: m.Vocab, KnowsModel: func(name string) bool { return name == m.Name },
	})
	if bad != nil {
		return nil, bad
	}
	if bad = r.CheckPlain(); bad != nil {
		return nil, bad
	}
	k := &call{n: n, o: o, r: r, stream: r.Stream}
	if k.prompts, bad = n.promptsOf(ctx, r); bad != nil {
		return nil, bad
	}
	if !r.SeedSet {
		r.Sampling.Seed = randomUint64()
	}
	prefix := "cmpl-"
	if chat {
		prefix = "chatcmpl-"
	}
	k.head = api.Head{ID: prefix + o.requestID, Model: m.Name, Created: wallSeconds(), Chat: chat}
	if bad := k.plan(); bad != nil {
		return k, bad
	}
	return k, nil
}

// parsed stamps that everything is ready for the runners: what follows is theirs.
func (k *call) parsed() {
	now := k.n.o.Steady.Now()
	for _, a := range k.tries {
		a.rec.Stamps.ParsedNS = &now
	}
}

// promptsOf gives the token ids of each prompt.
func (n *Node) promptsOf(ctx context.Context, r *api.Request) ([][]int32, *api.Error) {
	if r.PromptTokenIDs != nil {
		return [][]int32{r.PromptTokenIDs}, nil
	}
	if r.Chat {
		if n.o.Render == nil {
			return nil, api.Invalid("messages", "this model has no chat template; send /v1/completions or prompt_token_ids")
		}
		if bad := r.CheckTurns(n.o.Model.ContextLen); bad != nil {
			return nil, bad
		}
		text, err := n.o.Render(ctx, r)
		if err != nil {
			return nil, api.Invalid("messages", "messages do not fit the chat template: %v", err)
		}
		return [][]int32{n.o.Tokenizer.Encode(text, false)}, nil
	}
	out := make([][]int32, 0, len(r.Prompts))
	for _, p := range r.Prompts {
		ids := p.IDs
		if ids == nil {
			ids = n.o.Tokenizer.Encode(p.Text(), true)
		}
		out = append(out, ids)
	}
	return out, nil
}

// plan makes the legs: prompts x n, or the one of a context or generation leg.
func (k *call) plan() *api.Error {
	kind, bad := kindOf(k.r.Disagg)
	if bad != nil {
		return bad
	}
	if (kind != infer.Aggregated || k.r.OutputTokenIDs != nil) && len(k.prompts)*k.r.N != 1 {
		return api.Invalid("n", "a leg has one prompt and n = 1; got %d prompts and n = %d", len(k.prompts), k.r.N)
	}
	if kind != infer.Aggregated && k.r.Disagg.DisaggRequestID == nil {
		return api.Invalid("disaggregated_params.disagg_request_id", "%s needs disagg_request_id", kind)
	}
	for i, prompt := range k.prompts {
		budget, bad := k.r.Budget(len(prompt), k.n.o.Model.ContextLen)
		if bad != nil {
			return bad
		}
		if budget <= len(k.r.OutputTokenIDs) {
			return api.Invalid("output_token_ids", "%d tokens were given already and max_tokens is %d", len(k.r.OutputTokenIDs), budget)
		}
		for choice := range k.r.N {
			k.add(kind, prompt, budget, i*k.r.N+choice)
		}
	}
	return nil
}

func (k *call) add(kind infer.Kind, prompt []int32, budget, index int) {
	n := k.n
	sampling := k.r.Sampling
	sampling.Seed += uint64(index % k.r.N)
	l := &Leg{
		Request: infer.Request{
			Kind: kind, Prompt: prompt, Output: k.r.OutputTokenIDs, MaxTokens: budget, Sampling: sampling,
			StopTokens: k.r.StopTokenIDs, IgnoreEOS: k.r.IgnoreEOS, Priority: k.r.Priority, Pin: k.r.Pin, ReturnPerfMetrics: k.o.metrics || n.o.ReturnPerfMetrics,
			Probe: k.o.probe,
		},
		Disagg: k.r.Disagg, Style: styleOf(k.r.Disagg), Limit: k.o.limit, KVWait: k.o.kvWait, index: index, now: n.o.Steady.Now,
	}
	if l.Limit > 0 {
		l.Request.DeadlineNS = n.o.Steady.Now() + int64(l.Limit)
	}
	rec := n.newRecord(k.o)
	rec.Style, rec.Streamed = l.Style, k.stream
	if k.o.streamed != nil {
		rec.Streamed = *k.o.streamed
	}
	if d := k.r.Disagg; d != nil && d.DisaggRequestID != nil {
		l.Request.ID, rec.DisaggRequestID = *d.DisaggRequestID, *d.DisaggRequestID
		l.usage = d.CtxUsage
	} else {
		l.Request.ID = n.mintID()
	}
	if k.o.router == noRouter {
		rec.Sub = index
	}
	k.tries = append(k.tries, &attempt{n: n, leg: l, rec: rec, text: newText(n.o.Tokenizer, k.r, k.r.OutputTokenIDs)})
}

// usage sums the legs: each prompt once, each token of each choice.
func (k *call) usage() api.Usage {
	var u api.Usage
	cached := 0
	for i, a := range k.tries {
		if i%k.r.N == 0 {
			u.PromptTokens += len(a.leg.Request.Prompt)
			cached += a.rec.Tokens.Cached
		}
		u.CompletionTokens += len(a.leg.Request.Output) + a.tokens
	}
	u.PromptTokensDetails = &api.PromptTokensDetails{CachedTokens: cached}
	if c := k.tries[0].leg.usage; c != nil { // the context node counted the prompt; this one has computed none of it
		u.PromptTokens, u.PromptTokensDetails = c.PromptTokens, c.PromptTokensDetails
	}
	u.TotalTokens = u.PromptTokens + u.CompletionTokens
	return u
}
