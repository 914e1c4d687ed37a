package worker

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// lostEngine ends by itself when it is told why.
type lostEngine struct {
	why     chan error
	drained chan struct{}
}

func (e *lostEngine) Run(context.Context) error { return <-e.why }
func (e *lostEngine) Drain()                    {}
func (e *lostEngine) Drained() <-chan struct{}  { return e.drained }
func (e *lostEngine) Load() infer.Load          { return infer.Load{} }
func (e *lostEngine) Loads() []infer.Load       { return nil }

// TestANodeWhoseEngineIsLostSaysSoAndEnds, also when a hand-over waits for a copy that its device does not end.
func TestANodeWhoseEngineIsLostSaysSoAndEnds(t *testing.T) {
	f := newFake(t)
	d, err := Open(t.Context(), Flags{Name: "gen0", Advertise: "127.0.0.1", ClockListen: "127.0.0.1:0", LedgerFlags: LedgerFlags{IterStatsInterval: 1, IterStatsMax: 10}},
		"127.0.0.1:0", phase.Gen, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	e := &lostEngine{make(chan error, 1), make(chan struct{})}
	held := make(chan struct{})
	defer close(held)
	ended := make(chan error, 1)
	go func() {
		ended <- d.Run(t.Context(), Parts{Face: Options{Model: f.o.Model, Tokenizer: f.o.Tokenizer, Aggregated: f.run}, Engine: e, Beside: []func(context.Context) error{
			func(context.Context) error { <-held; return nil },
		}})
	}()
	health := func() (int, string) {
		w := httptest.NewRecorder()
		d.Routes().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/health", nil))
		return w.Code, w.Body.String()
	}
	for !d.ready.Load() {
		select {
		case err := <-ended:
			t.Fatalf("the node ended: %v", err)
		default:
		}
	}
	if code, text := health(); code != http.StatusOK {
		t.Errorf("before: health %d %s", code, text)
	}
	hangs := errors.New("the device hangs")
	e.why <- hangs
	if err := <-ended; !errors.Is(err, hangs) {
		t.Errorf("the node ended with %v", err)
	}
	if code, text := health(); code != http.StatusServiceUnavailable || !strings.Contains(text, hangs.Error()) {
		t.Errorf("after: health %d %s, want 503 and why", code, text)
	}
}
