// Package profile records windows of iterations: a Chrome trace of what host and device did, and a Go CPU profile of the
// same time. window.go decides, trace.go writes; a Profiler owns the one window, its files and its claim.
//
// Start and Stop are called by anybody; what they change in an open window they change on the engine's goroutine, which
// also calls Planning, Built, Collected and Ended. Files are written by a goroutine of the window's own after its last
// iteration, so that the engine waits for no disk. A file that has its final name is complete.
package profile

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/shared/rows"
)

// Options of a profiler.
type Options struct {
	Name    string // of the node, in the trace
	Dir     string // where traces go that name no folder; "": the working folder
	Windows string // iterations that are profiled without being asked: see ParseRanges
	Rank    int
	ClockID string // of the stamps; "": not known
	Logger  *slog.Logger
	Lives   func() []Life // the requests that have not ended, on the engine's goroutine; nil: none
}

// FlushWait bounds the wait for the files of a window.
const FlushWait = 30 * time.Second

// Loop runs f on the engine's goroutine with the number of the next iteration and whether some are in flight, and waits.
type Loop func(ctx context.Context, f func(next int64, pending bool)) error

// Profiler owns the windows of one engine.
type Profiler struct {
	o    Options
	busy atomic.Bool // a window is scheduled or active: the engine has to look

	mu    sync.Mutex // guards what follows
	w     window
	dir   string // of the last claim
	files *files
	rec   recording
	acts  []string
	done  chan struct{} // closed when the window's files are written
	ended ended         // the window before
	plan  []Range       // windows to come
}

// ended is how a window came out.
type ended struct {
	window rows.ProfileWindow // no Files: it was cancelled before it began
	known  bool
	err    error
}

// New makes a profiler.
func New(o Options) (*Profiler, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	plan, err := ParseRanges(o.Windows)
	if err != nil {
		return nil, err
	}
	p := &Profiler{o: o, plan: plan}
	p.busy.Store(len(plan) > 0)
	return p, nil
}

// Start claims the window, prepares its files and schedules it. Whatever fails gives the claim back and is returned.
func (p *Profiler) Start(ctx context.Context, r rows.ProfileRequest, loop Loop) (rows.ProfileWindow, error) {
	acts, err := check(r)
	if err != nil {
		return rows.ProfileWindow{}, err
	}
	acts = p.own(acts)
	dir := r.OutputDir
	if dir == "" {
		dir = p.o.Dir
	}
	if err := p.claim(dir); err != nil {
		return rows.ProfileWindow{}, err
	}
	f, err := createFiles(dir, p.o.Rank, acts)
	if err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.clear()
		return rows.ProfileWindow{}, fmt.Errorf("%w: %w", rows.ErrProfileInvalid, err)
	}
	granted := rows.ProfileWindow{Activities: acts, Files: f.final()}
	var lost, adopted bool // the caller went before the engine came to it, or after; guarded by mu
	err = loop(ctx, func(next int64, _ bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		if lost {
			return
		}
		adopted = true
		p.w.schedule(next, r.StartStep, r.NumSteps)
		p.adopt(f, acts)
		granted.StartIter = p.w.start
		if stop := p.w.stop; stop != forever {
			granted.StopIter = &stop
		}
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil && !adopted { // an adopted window is the engine's, and may have begun: it stays
		lost = true
		f.discard()
		p.clear()
		return rows.ProfileWindow{}, fmt.Errorf("schedule a profile: %w", err)
	}
	return granted, nil
}

// own leaves out what is not of this rank: the process has one CPU profile at a time, rank 0's.
func (p *Profiler) own(acts []string) []string {
	if p.o.Rank == 0 {
		return acts
	}
	return slices.DeleteFunc(acts, func(a string) bool { return a == CPU })
}

func (p *Profiler) claim(dir string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.w.state != idle {
		stop := "until it is stopped"
		if p.w.stop != forever {
			stop = fmt.Sprintf("to %d", p.w.stop-1)
		}
		if p.w.state == claimed {
			return fmt.Errorf("%w: one is being prepared in %q", rows.ErrProfileBusy, p.dir)
		}
		return fmt.Errorf("%w: iterations %d %s, %v", rows.ErrProfileBusy, p.w.start, stop, p.w.state)
	}
	p.w, p.dir = window{state: claimed, stop: forever}, dir
	return nil
}

// adopt takes the files of a scheduled window.
func (p *Profiler) adopt(f *files, acts []string) {
	p.files, p.acts, p.rec, p.done = f, acts, recording{}, make(chan struct{})
	p.busy.Store(true)
}

// clear gives the claim back.
func (p *Profiler) clear() {
	p.w, p.files, p.rec = window{}, nil, recording{}
	p.busy.Store(len(p.plan) > 0)
}

// Stop ends the window with the iterations in flight and waits for its files, up to FlushWait; of one that has ended by
// itself it says how that came out. A window that has not begun is cancelled: it leaves no file.
func (p *Profiler) Stop(ctx context.Context, loop Loop) (rows.ProfileWindow, error) {
	var done chan struct{}
	err := loop(ctx, func(next int64, pending bool) {
		p.mu.Lock()
		defer p.mu.Unlock()
		switch p.w.state {
		case claimed:
		case idle:
			if p.ended.known {
				done = p.done
			}
		case scheduled, active:
			done = p.done
			if p.w.halt(next, pending) {
				p.finish()
			}
		case flushing:
			done = p.done
		}
	})
	switch {
	case err != nil:
		return rows.ProfileWindow{}, fmt.Errorf("stop the profile: %w", err)
	case done == nil:
		return rows.ProfileWindow{}, rows.ErrProfileNone
	}
	if err := wait(ctx, done); err != nil {
		return rows.ProfileWindow{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ended.window, p.ended.err
}

func wait(ctx context.Context, done <-chan struct{}) error {
	limited, cancel := context.WithTimeout(ctx, FlushWait)
	defer cancel()
	select {
	case <-done:
		return nil
	case <-limited.Done():
		return fmt.Errorf("write the profile: %w", limited.Err())
	}
}

// Close ends an open window when the engine ends, and waits for its files.
func (p *Profiler) Close() {
	p.mu.Lock()
	p.plan = nil
	done := p.done
	switch p.w.state {
	case scheduled, active:
		p.finish()
	case flushing:
	default:
		done = nil
	}
	p.mu.Unlock()
	if done == nil {
		return
	}
	if err := wait(context.Background(), done); err != nil {
		p.o.Logger.Warn("profile not written", "error", err)
	}
}

// Planning tells whether the engine has to stamp what it does next; without a window it costs one atomic read.
func (p *Profiler) Planning() bool { return p != nil && p.busy.Load() }

// Built says that an iteration was built. It opens the window that begins with it, and tells whether the iteration is to
// be stamped, and its layers.
func (p *Profiler) Built(iter int64) (stamped, layers bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.planned(iter)
	if p.w.built(iter) {
		p.o.Logger.Info("profile begins", "iter", iter)
		if err := p.files.begin(); err != nil {
			p.o.Logger.Warn("no CPU profile", "error", err)
		}
	}
	stamped = p.w.holds(iter)
	return stamped, stamped && slices.Contains(p.acts, Layers)
}

// planned schedules the window of the configuration that begins with this iteration.
func (p *Profiler) planned(iter int64) {
	for len(p.plan) > 0 && p.plan[0].First <= iter {
		r := p.plan[0]
		p.plan = p.plan[1:]
		if p.w.state != idle {
			p.o.Logger.Warn("profile skipped: another window is open", "first", r.First, "last", r.Last)
			continue
		}
		acts := p.own([]string{CPU, GPU})
		f, err := createFiles(p.o.Dir, p.o.Rank, acts)
		if err != nil {
			p.o.Logger.Warn("profile skipped", "first", r.First, "last", r.Last, "error", err)
			continue
		}
		p.w = window{state: scheduled, start: r.First, stop: r.Last + 1}
		p.adopt(f, acts)
	}
	p.busy.Store(len(p.plan) > 0 || p.w.state == scheduled || p.w.state == active)
}

// Collected takes in an iteration, and ends the window after its last one.
func (p *Profiler) Collected(s Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.w.holds(s.Iter) {
		if !slices.Contains(p.acts, GPU) {
			s.ForwardStartNS, s.ForwardEndNS, s.SampleEndNS = 0, 0, 0
			clear(s.Stages)
		}
		p.rec.step(s)
	}
	if p.w.collected(s.Iter) {
		p.finish()
	}
}

// Ended takes in a request that has ended.
func (p *Profiler) Ended(l Life) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.w.state == active {
		p.rec.life(l)
	}
}

// finish ends the window; its files are written by a goroutine that Stop and Close wait for.
func (p *Profiler) finish() {
	if p.w.state == scheduled { // it has seen nothing
		p.files.discard()
		p.ended = ended{known: true, window: rows.ProfileWindow{StartIter: p.w.start, Activities: p.acts}}
		close(p.done)
		p.clear()
		return
	}
	if p.o.Lives != nil {
		for _, l := range p.o.Lives() {
			p.rec.life(l)
		}
	}
	p.w.state = flushing
	p.busy.Store(len(p.plan) > 0)
	f, rec, done := p.files, p.rec, p.done
	stop := p.w.start
	if n := len(rec.steps); n > 0 {
		stop = rec.steps[n-1].Iter + 1
	}
	how := ended{known: true, window: rows.ProfileWindow{StartIter: p.w.start, StopIter: &stop, Activities: p.acts, Files: f.final()}}
	about := fmt.Sprintf(`,"schema":"meridian.trace/1","node":%q,"rank":%d,"clock_id":%q,"start_iter":%d,"steps":%d`, p.o.Name, p.o.Rank, p.o.ClockID, p.w.start, len(rec.steps))
	go func() {
		defer close(done)
		err := f.write(appendTrace(nil, p.o.Name, p.o.Rank, &rec, about))
		if err != nil {
			how.err, how.window.Files = fmt.Errorf("write the profile: %w", err), nil
		}
		p.mu.Lock()
		p.ended = how
		p.clear()
		p.mu.Unlock()
		if err != nil {
			p.o.Logger.Warn("profile not written", "error", err)
			return
		}
		p.o.Logger.Info("profile written", "files", f.final())
	}()
}
