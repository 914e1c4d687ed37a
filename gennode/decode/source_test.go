package decode

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/worker"
)

// failSource puts the KV of a request on offer, and fails it once its receiver has asked.
func (p *pair) failSource(t *testing.T, r infer.Request, id int64) {
	r.ID, r.Kind = id, infer.ContextOnly
	seq, err := p.ctx.Engine.Submit(r)
	if err != nil {
		t.Error(err)
		return
	}
	offer, err := p.server.Offer(id, seq.Export())
	if err != nil {
		t.Error(err)
		return
	}
	for ctx := t.Context(); ctx.Err() == nil; time.Sleep(time.Millisecond) {
		if rep, _ := offer.Result(); rep.RequestedNS != 0 {
			break
		}
	}
	offer.Fail(errors.New("the engine broke"))
	seq.Cancel()
	_, _ = drain(t.Context(), seq)
}

// soon is how long a leg may take here.
const soon = time.Minute

// move tells a leg another source.
func (p *pair) move(t *testing.T, id int64, to *api.DisaggParams) error {
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	return p.decoder.Move(ctx, id, to)
}

// begin starts a generation_first leg, and gives its answer.
func (p *pair) begin(t *testing.T, r infer.Request, wait time.Duration) (*worker.Leg, <-chan []int32) {
	t.Helper()
	l := &worker.Leg{Request: r, Style: "generation_first", Limit: time.Minute, KVWait: wait, Disagg: p.params(r.ID, api.GenerationFirst)}
	l.Request.Kind = infer.GenerationOnly
	seq, err := p.decoder.Generation(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	out := make(chan []int32, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		defer cancel()
		tokens, err := drain(ctx, seq)
		if err != nil {
			t.Errorf("leg %d: %v", r.ID, err)
		}
		out <- tokens
	}()
	return l, out
}

func TestALegThatWaitsMovesToAnotherSourceAndKeepsItsPlace(t *testing.T) {
	p := newPair(t, "sim", 16, 16)
	defer p.stop()
	req := infer.Request{ID: 1, Prompt: promptOf(rand.New(rand.NewPCG(9, 9)), 70, p.gen.Info.Vocab), MaxTokens: 12, IgnoreEOS: true}
	want, _, err := p.run(t.Context(), "aggregated", req)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		before func(id int64) // what becomes of the first source, ahead of the move
	}{
		{"the first source is silent", func(int64) {}},
		{"the first source fails", func(id int64) { p.failSource(t, req, id) }},
	} {
		req.ID += 10
		l, out := p.begin(t, req, soon)
		c.before(req.ID)
		other := req
		other.ID++
		if err := p.move(t, req.ID, p.params(other.ID, api.GenerationFirst)); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if _, err := p.prefill(t.Context(), "generation_first", other); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if got := <-out; !slices.Equal(got, want) || l.Handle != other.ID || l.Transfer == nil || l.Transfer.InstalledNS == nil {
			t.Errorf("%s: %v, want %v; handle %d, transfer %+v", c.name, got, want, l.Handle, l.Transfer)
		}
		if err := p.move(t, req.ID, p.params(other.ID, api.GenerationFirst)); status(err) != http.StatusNotFound {
			t.Errorf("%s: a leg that has its KV: %v, want 404", c.name, err)
		}
	}
}

// TestAMoveToAPrefillThatIsDone: the other context node has worked ahead, under a lease.
func TestAMoveToAPrefillThatIsDone(t *testing.T) {
	p := newPair(t, "sim", 16, 16)
	defer p.stop()
	req := infer.Request{ID: 1, Prompt: promptOf(rand.New(rand.NewPCG(8, 9)), 70, p.gen.Info.Vocab), MaxTokens: 5, IgnoreEOS: true}
	want, _, err := p.run(t.Context(), "aggregated", req)
	if err != nil {
		t.Fatal(err)
	}
	req.ID = 50
	l, out := p.begin(t, req, 0)
	other := req
	other.ID = 51
	if _, err := p.prefill(t.Context(), "context_first", other); err != nil {
		t.Fatal(err)
	}
	if err := p.move(t, 50, p.params(51, api.ContextFirst)); err != nil {
		t.Fatal(err)
	}
	if got := <-out; !slices.Equal(got, want) || l.Handle != 51 {
		t.Errorf("got %v, want %v; handle %d", got, want, l.Handle)
	}
}

func TestWithoutAnotherSourceALegFailsWhenItsWaitIsOver(t *testing.T) {
	p := newPair(t, "sim", 16, 16)
	defer p.stop()
	r := infer.Request{ID: 5, Kind: infer.GenerationOnly, Prompt: []int32{20, 21, 22}, MaxTokens: 4}
	l := &worker.Leg{Request: r, Style: "generation_first", KVWait: time.Millisecond, Disagg: p.params(5, api.GenerationFirst)}
	seq, err := p.decoder.Generation(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	var source sync.WaitGroup
	source.Go(func() { p.failSource(t, r, 5) })
	_, err = drain(t.Context(), seq)
	source.Wait()
	var bad *api.Error
	if !errors.As(err, &bad) || bad.Stage != "kv" || !bad.Retryable {
		t.Errorf("got %v", err)
	}
}

func TestMovesThatCannotBeAreRefused(t *testing.T) {
	p := newPair(t, "sim", 16, 16)
	defer p.stop()
	req := infer.Request{ID: 3, Prompt: []int32{20, 21, 22}, MaxTokens: 4, IgnoreEOS: true}
	_, out := p.begin(t, req, 0)
	e := echo.New()
	e.PUT("/kv/:id", p.decoder.move)
	for _, c := range []struct {
		id, body string
		status   int
	}{
		{"x", `{}`, 400}, {"3", `[`, 400}, {"3", `{"ctx_info_endpoint":"tcp://` + p.addr + `"}`, 400}, {"3", `{}`, 400},
		{"3", `{"disagg_request_id":4,"ctx_info_endpoint":"tcp://192.0.2.1:9"}`, 503},
		{"99", `{"disagg_request_id":4,"ctx_info_endpoint":"tcp://` + p.addr + `"}`, 404},
		{"3", `{"a":"` + strings.Repeat("x", maxMove) + `"}`, 400},
	} {
		w := httptest.NewRecorder()
		var got error
		e.HTTPErrorHandler = func(err error, _ echo.Context) { got = err }
		e.ServeHTTP(w, httptest.NewRequest(http.MethodPut, "/kv/"+c.id, strings.NewReader(c.body)))
		if status(got) != c.status {
			t.Errorf("PUT /kv/%s %.60s: %v, want %d", c.id, c.body, got, c.status)
		}
	}
	if _, err := p.prefill(t.Context(), "generation_first", req); err != nil {
		t.Fatal(err)
	}
	<-out
}

func status(err error) int {
	var bad *api.Error
	if errors.As(err, &bad) {
		return bad.Status()
	}
	return 0
}
