// Package engine owns the one executor: it takes requests in, plans steps (gpu/sched), gives them to a back end, and gives
// tokens, KV and reports out. It knows no HTTP, no NATS and no tokenizer.
//
// One goroutine, that of loop, owns the scheduler, the KV pool and all sequences; every other goroutine posts
// commands to it or reads what it published. It never waits for a consumer: a sequence's buffer is bounded by its
// MaxTokens. With Overlap it plans step N+1 and submits it while the back end runs N, so the device does not wait for
// the host; a sequence that ended in N is then in N+1 too, and that result is thrown away.
//
// Each KV block has an owner at every moment: a sequence, a Reservation or an Export, each of which ends by a call or by
// its deadline, else the cache or nobody. A cancel marks; blocks are given back when the step or copy in flight that
// names them has ended.
package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kv"
	"meridian.internal/gpu/profile"
	"meridian.internal/gpu/sched"
	"meridian.internal/shared/blockhash"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
)

// Config of an engine. Now is required; the zero value of the rest means what the comments say.
type Config struct {
	MaxBatchSize int // sequences with a slot; 0: as many as the back end has
	MaxNumTokens int // query tokens of a step; 0: 2048. More makes prefill faster and tokens of others later
	MaxWaiting   int // queued requests, reservations included; 0: 1024
	Overlap      bool
	PrefixReuse  bool
	HostKVBytes  int64 // host memory that keeps KV blocks which the device evicts; 0 or no PrefixReuse: none
	DiskKVBytes  int64 // of the files in DiskKVDir, which keep KV blocks beyond the life of the engine
	DiskKVDir    string
	EOS          []int32
	// ExportDeadline is how long the KV of a finished prefill waits for its transfer; 0: 30 s.
	ExportDeadline time.Duration
	// ReserveDeadline is how long a Reservation may wait for its KV; 0: 60 s. The request's own deadline holds too.
	ReserveDeadline time.Duration
	// StepDeadline is the least time that a step may take before the device counts as hung; 0: 1 min. It may take more where steps
	// lately took more than a tenth of it; see watch.
	StepDeadline   time.Duration
	MaxStepRecords int                 // decode steps kept a request that asks for them; 0: 8192
	Now            func() int64        // the node's steady clock in ns; deadlines and stamps are in it
	Logger         *slog.Logger        // nil: nothing is logged
	KVEvents       func(kvevent.Event) // told of stored and removed blocks on the engine's goroutine; must not block
	Epoch          int64               // of KVEvents; 0: Now at the start
	OnIteration    func(*Iteration)    // called on the engine's goroutine after each step; nil costs nothing
	OnIdle         func(*Iteration)    // called there when nothing is left to run, with what was counted since the last step
	OnLoad         func()              // called there when Load, but for its Iter, is another; must not block
	RequestStates  bool                // OnIteration is told the state of every request
	// Energy is the newest reading of the device's energy counter in joules; it must not block. nil: no energy is known.
	Energy  func() (joules float64, ok bool)
	Profile *profile.Options // nil: no profile windows
	Rank    int              // data-parallel rank, for reports
	Peers   *Peers           // the other ranks; nil: there is none
}

func (c *Config) setDefaults(info backend.Info) {
	for _, d := range []struct {
		field *int
		value int
	}{{&c.MaxBatchSize, info.MaxSlots}, {&c.MaxNumTokens, 2048}, {&c.MaxWaiting, 1024}, {&c.MaxStepRecords, 8192}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.ExportDeadline == 0 {
		c.ExportDeadline = 30 * time.Second
	}
	if c.ReserveDeadline == 0 {
		c.ReserveDeadline = time.Minute
	}
	if c.StepDeadline == 0 {
		c.StepDeadline = time.Minute
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
}

func (c *Config) validate(info backend.Info) error {
	switch {
	case c.Now == nil:
		return fmt.Errorf("engine: no clock: Now is nil")
	case c.MaxBatchSize < 1 || c.MaxBatchSize > info.MaxSlots:
		return fmt.Errorf("engine: MaxBatchSize is %d, must be 1 to %d, the slots of the back end", c.MaxBatchSize, info.MaxSlots)
	case c.MaxNumTokens < c.MaxBatchSize:
		return fmt.Errorf("engine: MaxNumTokens is %d, must be at least MaxBatchSize, %d", c.MaxNumTokens, c.MaxBatchSize)
	case c.MaxWaiting < 1 || c.MaxStepRecords < 0:
		return fmt.Errorf("engine: MaxWaiting is %d, must be at least 1; MaxStepRecords is %d, must not be negative", c.MaxWaiting, c.MaxStepRecords)
	case info.Stage != backend.Stage{End: info.Layers}:
		return fmt.Errorf("engine: the back end owns layers [%d, %d) of %d; one engine needs all", info.Stage.First, info.Stage.End, info.Layers)
	case info.KVBlocks < 1 || info.TokensPerBlock < 1:
		return fmt.Errorf("engine: the back end has %d KV blocks of %d tokens", info.KVBlocks, info.TokensPerBlock)
	}
	return nil
}

// Engine runs requests on one back end.
type Engine struct {
	cfg  Config
	b    backend.Backend
	info backend.Info
	prof *profile.Profiler // nil: none

	// Owned by the goroutine of loop.
	pool       *kv.Pool   // of the layers that see everything; its windows are those of the others
	windows    []*kv.Pool // in the order of info.Windows
	full       bool       // there are layers that see everything; otherwise the blocks of pool have no bytes and are not counted
	tiers      tiers
	sched      *sched.Scheduler
	flights    []*flight // submitted steps, oldest first; at most depth
	idle       []*flight // step buffers to reuse
	iter       int64
	exports    map[*Export]struct{}
	deadline   int64 // the earliest of anything, 0 for none
	failures   int   // failed steps in a row
	interval   Iteration
	log        batchLog
	meter      meter
	missed     int64 // of the pool's totals, as of the last admission
	eventSeq   int64
	timer      *time.Timer
	drainDone  bool
	step       lockstep // with Peers
	watch      watch
	submitting *flight // inside Submit

	commands mailbox
	queued   atomic.Int64 // accepted requests that never had a slot
	draining atomic.Bool
	drained  chan struct{}
	stopped  chan struct{}

	mu   sync.Mutex // guards load
	load infer.Load
}

// New makes an engine; Run runs it. The caller closes the back end after Run has returned.
func New(cfg Config, b backend.Backend) (*Engine, error) {
	info := b.Info()
	cfg.setDefaults(info)
	if err := cfg.validate(info); err != nil {
		return nil, err
	}
	if cfg.Epoch == 0 {
		cfg.Epoch = cfg.Now()
	}
	e := &Engine{
		cfg: cfg, b: b, info: info,
		exports: make(map[*Export]struct{}),
		drained: make(chan struct{}), stopped: make(chan struct{}),
		commands: mailbox{wake: make(chan struct{}, 1)}, meter: meter{read: cfg.Energy}, watch: newWatch(cfg.StepDeadline),
	}
	e.pool = kv.New(info.KVBlocks, info.TokensPerBlock, blockhash.Root(info.ModelHash, ""), e.poolEvents())
	for _, w := range info.Windows {
		e.pool.AddWindow(w.Tokens, w.Blocks, e.ahead())
	}
	e.windows, e.full = e.pool.Windows(), info.GroupLayers(0) > 0
	e.interval.WindowDecodeBlocks = make([]int, len(e.windows))
	if err := e.openTiers(); err != nil {
		e.tiers.close()
		return nil, err
	}
	e.sched = sched.New(sched.Config{
		MaxBatchSize: cfg.MaxBatchSize, MaxNumTokens: cfg.MaxNumTokens, PrefixReuse: cfg.PrefixReuse, MicroBatches: info.Stages, OnAdmit: e.admitted,
	}, e.pool)
	if cfg.Profile != nil {
		o := *cfg.Profile
		o.Logger, o.Lives = cfg.Logger, e.lives
		var err error
		if e.prof, err = profile.New(o); err != nil {
			e.tiers.close()
			return nil, err
		}
	}
	for range e.depth() {
		e.idle = append(e.idle, new(flight))
	}
	e.publishLoad()
	return e, nil
}

// depth is how many steps may be in flight.
func (e *Engine) depth() int {
	if e.cfg.Overlap {
		return max(2, e.info.Stages)
	}
	return max(1, e.info.Stages)
}

// ahead is how many tokens the steps in flight may hold.
func (e *Engine) ahead() int { return e.depth() * e.cfg.MaxNumTokens }

// Info describes the back end.
func (e *Engine) Info() backend.Info { return e.info }

// Config is the engine's configuration, defaults filled in.
func (e *Engine) Config() Config { return e.cfg }

// maxFailures is how many steps in a row may fail before the device counts as lost.
const maxFailures = 3

// loop is what Run runs.
func (e *Engine) loop(ctx context.Context) error {
	e.timer = time.NewTimer(time.Hour)
	var err error
	for ctx.Err() == nil && err == nil {
		e.runCommands()
		e.expire()
		e.offload()
		if err = e.arrive(); err != nil {
			break
		}
		if len(e.flights) < e.depth() && e.submit() && len(e.flights) < e.depth() {
			e.publishLoad()
			continue
		}
		e.publishLoad()
		e.checkDrained()
		if len(e.flights) == 0 {
			e.meter.slept = true
			e.idled()
		}
		err = e.wait(ctx)
	}
	return e.stop(err)
}

// wait sleeps until a step is done, a command is posted or a deadline has come.
func (e *Engine) wait(ctx context.Context) error {
	var done <-chan struct{}
	if len(e.flights) > 0 {
		done = e.flights[0].step.Done()
	}
	e.timer.Reset(e.untilDeadline())
	called, released := e.meeting()
	select {
	case <-done:
		return e.collect()
	case <-called:
		e.step.called = true
	case r := <-released:
		return e.released(r)
	case <-e.watch.hung:
		return e.watch.err
	case <-e.commands.wake:
	case <-e.timer.C:
	case <-ctx.Done():
	}
	return nil
}

func (e *Engine) untilDeadline() time.Duration {
	if e.deadline == 0 {
		return time.Hour
	}
	return max(time.Duration(e.deadline-e.cfg.Now()), 0)
}

// stopWait bounds the wait for the steps in flight at the end of loop.
const stopWait = 10 * time.Second

// stop ends everything that is left.
func (e *Engine) stop(cause error) error {
	wait := stopWait
	if errors.Is(cause, ErrHung) {
		wait = 0 // it has been waited for
	}
	e.closeTiers(wait)
	for _, command := range e.commands.close() {
		command()
	}
	cause = e.lastSteps(wait, cause)
	why := ErrStopped
	if cause != nil {
		why = fmt.Errorf("%w: %w", ErrStopped, cause)
	}
	for _, list := range [][]*sched.Seq{e.sched.Waiting(), e.sched.Running()} {
		for len(list) > 0 { // end takes from the end of the scheduler's own list
			q := list[len(list)-1]
			list = list[:len(list)-1]
			e.end(q.Data.(*Sequence), infer.Done{Reason: infer.FinishFailed, Err: why}, nil)
		}
	}
	for x := range e.exports {
		x.fail(why)
		e.unlease(x)
	}
	e.publishLoad()
	e.idled()
	if p := e.cfg.Peers; p != nil {
		p.Hear(nil, e.look())
	}
	if e.prof != nil {
		e.prof.Close()
	}
	close(e.stopped)
	return cause
}

// lastSteps waits for the steps in flight.
func (e *Engine) lastSteps(wait time.Duration, cause error) error {
	e.timer.Reset(wait)
	defer e.timer.Stop() // not in loop: its goroutine may be lost in a call, and come back at any moment
	for len(e.flights) > 0 {
		select {
		case <-e.flights[0].step.Done():
			if err := e.collect(); cause == nil {
				cause = err
			}
		case <-e.timer.C:
			if cause == nil {
				cause = fmt.Errorf("engine: step %d still runs %v after the end: %w", e.flights[0].step.Iter, wait, ErrStopped)
			}
			return cause
		}
	}
	return cause
}

// Drain refuses new work from now on; running work goes on. Drained tells when it has ended.
func (e *Engine) Drain() {
	e.draining.Store(true)
	e.post(func() {})
}

// Drained is closed when the engine was told to drain and holds no sequence, reservation or export any more.
func (e *Engine) Drained() <-chan struct{} { return e.drained }

func (e *Engine) checkDrained() {
	if e.drainDone || !e.draining.Load() || len(e.flights)+len(e.exports)+len(e.sched.Waiting())+len(e.sched.Running()) > 0 {
		return
	}
	e.drainDone = true
	close(e.drained)
}
