// Package hardware is the hardware ledger of one process: what it and its accelerator use, read a few times a minute by a
// goroutine of its own, so that nothing on the serving path waits for a file or a driver. It owns the readings and their
// metrics; what cannot be read is unknown, never 0.
package hardware

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"meridian.internal/shared/rows"
)

// Sample is one reading. Sizes are in bytes.
type Sample struct {
	AtNS       int64 // Unix time
	CPU        rows.Ratio
	RSS        rows.Int
	PeakRSS    rows.Int
	Pinned     rows.Int // pages that cannot be swapped or moved
	Threads    rows.Int
	OpenFiles  rows.Int
	NetRead    rows.Int // of all interfaces of the process's network namespace but loopback
	NetWritten rows.Int
	HeapBytes  rows.Int // live and not yet collected
	GoRoutines rows.Int
	GCCycles   rows.Int
	GCPause    rows.Ratio // seconds, all pauses; an estimate from a histogram
	GPUs       []rows.GPU
}

// Options of a sampler.
type Options struct {
	Every  time.Duration              // 0: 1 s
	GPUs   func() ([]rows.GPU, error) // nil: this build reads none
	Logger *slog.Logger
}

// Sampler keeps the newest reading.
type Sampler struct {
	o       Options
	newest  atomic.Pointer[Sample]
	gpuGone bool // owned by the goroutine of Run: said once, not asked again
}

// New makes a sampler with a first reading.
func New(o Options) *Sampler {
	if o.Every == 0 {
		o.Every = time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	s := &Sampler{o: o}
	s.read()
	return s
}

// Run reads until ctx ends.
func (s *Sampler) Run(ctx context.Context) error {
	t := time.NewTicker(s.o.Every)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
			s.read()
		}
	}
}

// Newest gives the newest reading. Any goroutine may call it; the sample must not be changed.
func (s *Sampler) Newest() *Sample { return s.newest.Load() }

// Memory is what rows of iterations carry: of the process, and of some of the accelerators.
func (s *Sampler) Memory(cards []int) rows.Memory {
	n := s.Newest()
	m := rows.Memory{CPU: n.RSS, Pinned: n.Pinned}
	for _, i := range cards {
		if i < len(n.GPUs) && n.GPUs[i].MemoryUsed.OK {
			m.GPU = rows.Some(m.GPU.V + n.GPUs[i].MemoryUsed.V)
		}
	}
	return m
}

// Energy is what some of the accelerators have used, in joules; not ok where that cannot be measured of each.
func (s *Sampler) Energy(cards []int) (joules float64, ok bool) {
	gpus := s.Newest().GPUs
	for _, i := range cards {
		if i >= len(gpus) || !gpus[i].Energy.OK {
			return 0, false
		}
		joules, ok = joules+gpus[i].Energy.V, true
	}
	return joules, ok
}

// Watch adds readings of accelerators; open is asked once, and what it cannot open is logged in one line. It must come
// before Run.
func (s *Sampler) Watch(open func() (func() ([]rows.GPU, error), error)) {
	read, err := open()
	if err == nil && read == nil {
		return // there are none
	}
	s.o.GPUs = func() ([]rows.GPU, error) {
		if err != nil {
			return nil, err
		}
		return read()
	}
	s.read()
}

func (s *Sampler) read() {
	n := &Sample{AtNS: time.Now().UnixNano()}
	readProcess(n)
	readRuntime(n)
	s.readGPUs(n)
	s.newest.Store(n)
}

// readGPUs asks no more after a failure: a driver that is not there does not come, and asking is slow.
func (s *Sampler) readGPUs(n *Sample) {
	if s.o.GPUs == nil || s.gpuGone {
		return
	}
	gpus, err := s.o.GPUs()
	if err != nil {
		s.gpuGone = true
		s.o.Logger.Info("no GPU readings", "error", err)
		return
	}
	n.GPUs = gpus
}
