package worker

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/token"
)

// fake is a node whose engine says one text, some tokens a time.
type fake struct {
	*Node
	srv *httptest.Server

	mu      sync.Mutex // guards what follows
	records []*phase.Record
	legs    []*Leg
	cancels int

	say    string // what every sequence says
	batch  int    // tokens of each Next
	reason infer.FinishReason
	fail   error // of the start
	breaks error // of the sequence, after its first batch
	hang   bool  // after the first batch, until cancelled
	rank   *int  // that ran it
}

func newFake(t *testing.T) *fake {
	t.Helper()
	raw, err := os.ReadFile("../../gpu/model/meridian-tiny/tokenizer.json")
	if err != nil {
		t.Skip("the embedded model's tokenizer is not there: " + err.Error())
	}
	tok, err := token.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	steady, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{say: "The quick brown fox jumps.", batch: 3, reason: infer.FinishStop}
	f.Node, err = New(Options{
		Name: "gen0", Role: phase.Gen, Tokenizer: tok, Steady: steady, Adjusted: clock.NewAdjusted(steady),
		Model:      Model{Model: node.Model{Name: "tiny", Hash: "h", ContextLen: 200}, Vocab: tok.VocabSize(), TokenizerJSON: raw},
		Aggregated: f.run, Generation: f.run, Context: f.run, Logger: slog.New(slog.DiscardHandler),
		Publish: func(r *phase.Record, _ *infer.StepRecords) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.records = append(f.records, r)
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	e := echo.New()
	e.HTTPErrorHandler = func(err error, c echo.Context) {
		var bad *api.Error
		if errors.As(err, &bad) && !c.Response().Committed {
			_ = c.JSONBlob(bad.Status(), bad.Append(nil))
		}
	}
	f.Routes(e)
	f.srv = httptest.NewServer(e)
	t.Cleanup(f.srv.Close)
	return f
}

func (f *fake) run(_ context.Context, l *Leg) (Sequence, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.legs = append(f.legs, l)
	if f.fail != nil {
		return nil, f.fail
	}
	l.Admitted()
	l.Flush()
	if l.Request.Kind == infer.ContextOnly {
		l.Answer = &api.DisaggParams{RequestType: api.ContextOnly, DisaggRequestID: &l.Request.ID}
	}
	ids := f.o.Tokenizer.Encode(f.say, false)
	return &said{f: f, ids: ids[min(len(l.Request.Output), len(ids)):], gone: make(chan struct{})}, nil
}

type said struct {
	f    *fake
	ids  []int32
	n    int
	gone chan struct{}
	once sync.Once
}

func (s *said) Next(ctx context.Context) ([]infer.Token, *infer.Done, error) {
	select {
	case <-s.gone:
		return nil, &infer.Done{Reason: infer.FinishCancelled}, nil
	default:
	}
	if s.n > 0 && s.f.breaks != nil {
		return nil, &infer.Done{Reason: infer.FinishFailed, Err: s.f.breaks}, nil
	}
	if s.n > 0 && s.f.hang {
		select {
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		case <-s.gone:
			return nil, &infer.Done{Reason: infer.FinishCancelled}, nil
		}
	}
	var out []infer.Token
	for range min(s.f.batch, len(s.ids)-s.n) {
		out = append(out, infer.Token{ID: s.ids[s.n], AtNS: int64(1000 + s.n), Logprob: -0.5, Top: []infer.Logprob{{Token: s.ids[s.n], Logprob: -0.5}}})
		s.n++
	}
	if s.n < len(s.ids) {
		return out, nil, nil
	}
	return out, &infer.Done{Reason: s.f.reason, Report: infer.Report{QueuedNS: 10, FirstScheduledNS: 20, FirstIter: 3, LastIter: 9, CachedTokens: 1, PromptTokens: 4, Rank: s.f.rank}}, nil
}

func (s *said) Cancel() {
	s.f.mu.Lock()
	s.f.cancels++
	s.f.mu.Unlock()
	s.once.Do(func() { close(s.gone) })
}

// post gives status and body.
func (f *fake) post(t *testing.T, path, body string, header ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.srv.URL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

func (f *fake) record(t *testing.T) *phase.Record {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.records) != 1 {
		t.Fatalf("%d records, want 1", len(f.records))
	}
	return f.records[0]
}
