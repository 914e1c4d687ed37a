package decode

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/worker"
)

func promptOf(r *rand.Rand, n, vocab int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(10 + r.IntN(vocab-10))
	}
	return out
}

func TestTheTextIsTheSameInEveryStyle(t *testing.T) {
	for _, c := range []struct {
		device             string
		ctxBlock, genBlock int
	}{{"sim", 16, 16}, {"sim", 32, 16}, {"sim", 8, 32}, {"cpu", 16, 16}, {"cpu", 32, 8}} {
		p := newPair(t, c.device, c.ctxBlock, c.genBlock)
		r := rand.New(rand.NewPCG(1, 2))
		id := int64(1 << 40)
		for _, n := range []int{1, 15, 16, 17, 47, 48, 49, 96, 200} { // around blocks and chunks
			req := infer.Request{Prompt: promptOf(r, n, p.gen.Info.Vocab), MaxTokens: 12, IgnoreEOS: true}
			if n%2 == 1 {
				req.Sampling = infer.Sampling{Temperature: 1, TopP: 0.9, RepetitionPenalty: 1.2, Seed: uint64(n)}
			}
			var want []int32
			for _, style := range []string{"generation_first", "context_first", "generation_first", "aggregated"} {
				id++
				req.ID = id
				got, l, err := p.run(t.Context(), style, req)
				if err != nil {
					t.Fatalf("%s %d tokens %s: %v", c.device, n, style, err)
				}
				if want == nil {
					want = got
					if l.Transfer == nil || l.Transfer.Bytes != int64(n*p.ctx.Info.KVBytes(0, p.ctx.Info.Layers)) || l.Transfer.Tokens != n || l.Transfer.Peer != "ctx0" || l.Taken != 1 {
						t.Errorf("%s %d tokens: transfer %+v", c.device, n, l.Transfer)
					}
				}
				if len(got) != 12 || !slices.Equal(got, want) {
					t.Errorf("%+v, %d tokens: %s says %v, want %v", c, n, style, got, want)
				}
			}
		}
		p.stop()
	}
}

func TestOnlyWhatIsMissingIsFetched(t *testing.T) {
	p := newPair(t, "sim", 16, 16)
	defer p.stop()
	prompt := promptOf(rand.New(rand.NewPCG(3, 4)), 100, p.gen.Info.Vocab)
	for i, held := range []int{0, 96} {
		_, l, err := p.run(t.Context(), "generation_first", infer.Request{ID: int64(i + 1), Prompt: prompt, MaxTokens: 3, IgnoreEOS: true})
		if err != nil {
			t.Fatal(err)
		}
		if l.Transfer.TokensHeld != held || l.Transfer.Tokens != 100-held {
			t.Errorf("request %d: %+v, want %d held", i, l.Transfer, held)
		}
	}
}

func TestAResumedLegSaysWhatTheFirstWouldHaveSaid(t *testing.T) {
	p := newPair(t, "sim", 16, 16)
	defer p.stop()
	req := infer.Request{ID: 1, Prompt: promptOf(rand.New(rand.NewPCG(5, 6)), 40, p.gen.Info.Vocab), MaxTokens: 20, IgnoreEOS: true,
		Sampling: infer.Sampling{Temperature: 0.8, Seed: 7, FrequencyPenalty: 0.3}}
	whole, _, err := p.run(t.Context(), "aggregated", req)
	if err != nil {
		t.Fatal(err)
	}
	req.ID, req.Output = 2, whole[:9]
	rest, _, err := p.run(t.Context(), "generation_first", req)
	if err != nil || !slices.Equal(rest, whole[9:]) {
		t.Errorf("got %v, %v; want %v", rest, err, whole[9:])
	}
}

func TestFirstTokensThatEndTheRequestNeedNoKV(t *testing.T) {
	p := newPair(t, "sim", 16, 16)
	defer p.stop()
	eos := p.gen.Model.Config.EOS[0]
	for _, c := range []struct {
		name   string
		first  int32
		max    int
		reason infer.FinishReason
	}{{"max_tokens is one", 50, 1, infer.FinishLength}, {"the first token is EOS", eos, 9, infer.FinishStop}} {
		d := p.params(5, api.ContextFirst)
		d.FirstGenTokens = []int32{c.first}
		l := &worker.Leg{Request: infer.Request{ID: 5, Kind: infer.GenerationOnly, Prompt: []int32{20, 21}, MaxTokens: c.max}, Disagg: d, Style: "context_first"}
		seq, err := p.decoder.Generation(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		tokens, done, err := seq.Next(t.Context())
		if err != nil || done == nil || done.Reason != c.reason || len(tokens) != 1 || tokens[0].AtNS == 0 {
			t.Errorf("%s: %v %+v %v", c.name, tokens, done, err)
		}
	}
}

func TestAPrefillThatIsTheWholeAnswerEndsTheStream(t *testing.T) {
	p := newPair(t, "sim", 16, 16)
	defer p.stop()
	got, _, err := p.run(t.Context(), "generation_first", infer.Request{ID: 9, Prompt: []int32{20, 21, 22}, MaxTokens: 1, IgnoreEOS: true})
	if err != nil || len(got) != 1 {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestBadLegsAreRefused(t *testing.T) {
	p := newPair(t, "sim", 16, 16)
	defer p.stop()
	foreign, none := "tcp://192.0.2.1:9", p.params(1, 1)
	none.CtxInfoEndpoint = nil
	elsewhere := p.params(1, 1)
	elsewhere.CtxInfoEndpoint = &foreign
	unknown := p.params(1, 0)
	unknown.FirstGenTokens = []int32{int32(p.gen.Info.Vocab)}
	probs := p.params(1, 0)
	probs.FirstGenTokens, probs.FirstGenLogProbs = []int32{5}, []byte(`{"a":1}`)
	for _, c := range []struct {
		name   string
		d      *api.DisaggParams
		status int
		want   string
	}{
		{"no endpoint", none, http.StatusBadRequest, "ctx_info_endpoint"},
		{"an endpoint that is no node's", elsewhere, http.StatusServiceUnavailable, "192.0.2.1"},
		{"a first token that the model does not have", unknown, http.StatusBadRequest, "first_gen_tokens[0] is"},
		{"logprobs of another form", probs, http.StatusBadRequest, "first_gen_log_probs"},
	} {
		l := &worker.Leg{Request: infer.Request{ID: 1, Kind: infer.GenerationOnly, Prompt: []int32{20}, MaxTokens: 4}, Disagg: c.d, Style: "generation_first"}
		_, err := p.decoder.Generation(t.Context(), l)
		var bad *api.Error
		if !errors.As(err, &bad) || bad.Status() != c.status || !strings.Contains(bad.Message+bad.Param, c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestALeaseThatIsGoneFailsTheLegAtOnce(t *testing.T) {
	p := newPair(t, "sim", 16, 16)
	defer p.stop()
	l := &worker.Leg{Request: infer.Request{ID: 77, Kind: infer.GenerationOnly, Prompt: []int32{20, 21}, MaxTokens: 4}, Disagg: p.params(77, api.ContextFirst), Style: "context_first"}
	seq, err := p.decoder.Generation(t.Context(), l)
	if err == nil {
		_, err = drain(t.Context(), seq)
	}
	var bad *api.Error
	if !errors.As(err, &bad) || bad.Stage != "kv" || !bad.Retryable || !strings.Contains(bad.Message, "no lease") {
		t.Errorf("got %v", err)
	}
}

func TestNothingLeaksWhateverIsGivenUp(t *testing.T) {
	p := newPair(t, "sim", 16, 32)
	r := rand.New(rand.NewPCG(7, 8))
	styles := []string{"generation_first", "context_first", "aggregated"}
	var work sync.WaitGroup
	var mu sync.Mutex
	finished, failed := 0, 0
	const unhurried = 2 * time.Minute // what is not given up is served long before, unless places have leaked
	for i := range 200 {
		req := infer.Request{ID: int64(i + 1), Prompt: promptOf(r, 1+r.IntN(150), 200), MaxTokens: 1 + r.IntN(30), IgnoreEOS: true}
		style, limit, admitted := styles[i%3], unhurried, time.Duration(0)
		switch r.IntN(4) {
		case 0: // mostly while it waits for a place
			limit = time.Duration(r.IntN(40_000)) * time.Microsecond
		case 1: // while its KV is on the way, or soon after
			admitted = time.Duration(1+r.IntN(3_000)) * time.Microsecond
		}
		work.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			defer cancel()
			out, _, err := p.runUntil(ctx, style, req, func() {
				if admitted > 0 {
					time.AfterFunc(admitted, cancel)
				}
			})
			mu.Lock()
			defer mu.Unlock()
			if err == nil && len(out) == req.MaxTokens {
				finished++
				return
			}
			failed++
			if limit == unhurried && admitted == 0 {
				t.Errorf("request %d (%s) gave %d of %d tokens: %v", req.ID, style, len(out), req.MaxTokens, err)
			}
		})
	}
	work.Wait()
	p.stop()
	t.Logf("%d finished, %d were given up", finished, failed)
	if finished == 0 || failed == 0 {
		t.Errorf("%d finished, %d failed: the test shows nothing", finished, failed)
	}
}
