package worker

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/hex"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/api"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/ledger"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/token"
)

// Model is what a node serves.
type Model struct {
	node.Model
	Vocab         int
	EOS           []int32
	TokenizerJSON []byte // tokenizer.json
	ConfigJSON    []byte // tokenizer_config.json; nil: none
	ChatTemplate  []byte // chat_template.jinja; nil: in ConfigJSON, if anywhere
}

// Options of a node's face. Aggregated is needed; Context and Generation where the node takes part in such legs.
type Options struct {
	Name       string
	Role       phase.Role
	Model      Model
	Tokenizer  *token.Tokenizer
	Render     func(ctx context.Context, r *api.Request) (string, error) // chat to text; nil: by the model's chat template
	Aggregated Runner
	Context    Runner
	Generation Runner
	Load       func() infer.Load
	Healthy    func() error                                  // nil: healthy
	Kind       func(err error) string                        // kind of an engine's error (gpu/device), "" for others; nil: all are others
	Publish    func(*phase.Record, *infer.StepRecords) error // nil: records are not kept
	Ledger     *ledger.Ledger                                // nil: none is kept
	Profiler   Profiler                                      // nil: no profile windows
	// ReturnPerfMetrics keeps the steps of every request, not only of those that ask.
	ReturnPerfMetrics bool
	KVAddr            string               // "host:port" of the KV listener; "": none
	Registry          *prometheus.Registry // nil: no metrics
	Steady            *clock.Steady
	Adjusted          *clock.Adjusted
	CardClocks        func() []clock.Estimate               // of the clocks of the devices' cards to Steady, or to that of a rank; nil: they have none of their own
	RankClock         func(rank int) (clock.Estimate, bool) // of the clock of a rank to Steady; false, nil: it is Steady
	Logger            *slog.Logger
	Version           string
}

// Node answers requests over HTTP.
type Node struct {
	o        Options
	lastID   atomic.Int64
	metrics  *metrics
	settling sync.WaitGroup // records that wait for the end of a hand-over
	server   []byte         // GET /tokenizer
}

// New makes the face of a node.
func New(o Options) (*Node, error) {
	if o.Ledger == nil {
		o.Ledger = ledger.New(ledger.Options{})
	}
	n := &Node{o: o}
	n.lastID.Store(int64(randomUint64() % (1 << 38))) // local ids stay below 2^40, and differ between incarnations
	m, err := newMetrics(o)
	if err != nil {
		return nil, err
	}
	n.metrics = m
	if n.server, err = tokenizerBody(o.Model); err != nil {
		return nil, err
	}
	if o.Render == nil {
		if n.o.Render, err = chatOf(o.Model); err != nil {
			o.Logger.Warn("chat is refused: the chat template cannot be used", "model", o.Model.Name, "error", err)
		}
	}
	return n, nil
}

// Routes registers everything but the admin routes, which the server has already.
func (n *Node) Routes(e *echo.Echo) {
	e.POST("/v1/completions", func(c echo.Context) error { return n.serve(c, false) })
	e.POST("/v1/chat/completions", func(c echo.Context) error { return n.serve(c, true) })
	e.GET("/v1/models", n.models)
	e.GET("/health", n.health)
	e.GET("/server_info", n.serverInfo)
	n.o.Ledger.Routes(e)
	if n.o.Profiler != nil {
		e.POST("/start_profile", n.startProfile)
		e.POST("/stop_profile", n.stopProfile)
	}
	e.GET("/tokenizer", n.tokenizer)
	offset := echo.WrapHandler(clock.OffsetHandler(n.o.Steady, n.o.Adjusted))
	e.GET(clock.OffsetPath, offset)
	e.POST(clock.OffsetPath, offset)
}

// Wait waits for the records that are still to come, until ctx ends.
func (n *Node) Wait(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		n.settling.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (n *Node) runner(k infer.Kind) Runner {
	switch k {
	case infer.ContextOnly:
		return n.o.Context
	case infer.GenerationOnly:
		return n.o.Generation
	}
	return n.o.Aggregated
}

// mintID gives an id for a request that no router numbered: [1, 2^40), as TensorRT-LLM keeps local ids.
func (n *Node) mintID() int64 { return n.lastID.Add(1)%(1<<40-1) + 1 }

// mintName gives a request id for a direct request.
func mintName() string {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], randomUint64())
	return "direct-" + hex.EncodeToString(b[:])
}

func randomUint64() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: it crashes the program instead
	return binary.LittleEndian.Uint64(b[:])
}

func (n *Node) health(c echo.Context) error {
	if n.o.Healthy != nil {
		if err := n.o.Healthy(); err != nil {
			return c.String(http.StatusServiceUnavailable, "the engine is unavailable: "+err.Error())
		}
	}
	return c.NoContent(http.StatusOK)
}
