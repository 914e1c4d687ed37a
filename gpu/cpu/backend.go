package cpu

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

// Options sets up a back end. Zero values are the defaults.
type Options struct {
	TokensPerBlock int           // tokens of one KV block; default 16
	KVBlocks       int           // KV blocks; the memory is allocated at once; default: enough for two full contexts
	WindowBlocks   int           // KV blocks of the layers of one sliding window; default: KVBlocks
	MaxSlots       int           // sequences that can hold a slot; default 64
	Stage          backend.Stage // layers to own; default: all of the model
	Threads        int           // goroutines that share the arithmetic; default GOMAXPROCS
	Kernel         string        // one of Kernels(); default: the best
	Now            func() int64  // the process's steady clock in ns; must be given
}

// Backend implements backend.Backend.
type Backend struct {
	backend.Inbox
	info      backend.Info
	kernel    string
	device    *device
	now       func() int64
	ended     sync.WaitGroup
	closePool sync.Once // so that a second Close is harmless
}

// New puts a model on the processor. The model must stay open until Close.
func New(m *model.Model, o Options) (*Backend, error) {
	info, err := describe(m, &o)
	if err != nil {
		return nil, err
	}
	ks, err := chooseKernels(o.Kernel)
	if err != nil {
		return nil, err
	}
	b := &Backend{Inbox: backend.NewInbox(), info: info, kernel: ks.name, now: o.Now, device: newDevice(m, info, ks, o)}
	b.ended.Go(b.runSteps)
	b.ended.Go(func() { b.runCopies(b.Out, b.device.kv.copyOut) })
	b.ended.Go(func() { b.runCopies(b.In, b.device.kv.copyIn) })
	return b, nil
}

// describe fills the defaults of o and checks it.
func describe(m *model.Model, o *Options) (backend.Info, error) {
	c := &m.Config
	o.TokensPerBlock = cmp.Or(o.TokensPerBlock, 16)
	if o.TokensPerBlock > 0 {
		o.KVBlocks = cmp.Or(o.KVBlocks, 2*((c.ContextLen+o.TokensPerBlock-1)/o.TokensPerBlock))
	}
	o.WindowBlocks = cmp.Or(o.WindowBlocks, o.KVBlocks)
	o.MaxSlots = cmp.Or(o.MaxSlots, 64)
	o.Threads = cmp.Or(o.Threads, runtime.GOMAXPROCS(0))
	if o.Stage == (backend.Stage{}) {
		o.Stage.End = c.Layers
	}
	for _, f := range []struct {
		name  string
		value int
	}{{"TokensPerBlock", o.TokensPerBlock}, {"KVBlocks", o.KVBlocks}, {"WindowBlocks", o.WindowBlocks}, {"MaxSlots", o.MaxSlots}, {"Threads", o.Threads}} {
		if f.value < 1 {
			return backend.Info{}, fmt.Errorf("cpu: option %s is %d; must be at least 1", f.name, f.value)
		}
	}
	if o.Stage.First < 0 || o.Stage.First >= o.Stage.End || o.Stage.End > c.Layers {
		return backend.Info{}, fmt.Errorf("cpu: stage of layers [%d, %d); the model has %d", o.Stage.First, o.Stage.End, c.Layers)
	}
	if o.Now == nil {
		return backend.Info{}, errors.New("cpu: option Now is missing; must be the steady clock of the process")
	}
	return backend.Info{
		Device: "cpu", ModelHash: m.Hash, Vocab: c.Vocab, ContextLen: c.ContextLen, Layers: c.Layers, Stage: o.Stage,
		Hidden: c.Hidden, KVHeads: c.KVHeads, HeadSize: c.HeadSize, KVType: "f32", RoPE: c.RoPE.String(),
		TokensPerBlock: o.TokensPerBlock, KVBlocks: o.KVBlocks, MaxSlots: o.MaxSlots,
		Windows: backend.WindowsOf(c.Windows, o.Stage, c.ContextLen, o.WindowBlocks),
		// Sine, cosine and powers come from the Go library, whose results may differ between architectures.
		Numerics: "cpu-f32-lanes16-" + runtime.GOARCH, DeviceClock: "mono",
	}, nil
}

// Info implements backend.Backend.
func (b *Backend) Info() backend.Info { return b.info }

// Kernel is the name of the kernels in use.
func (b *Backend) Kernel() string { return b.kernel }

// Close implements backend.Backend.
func (b *Backend) Close() error {
	b.End()
	b.ended.Wait()
	b.closePool.Do(b.device.pool.close) // last: the steps that were queued still used it
	return nil
}

func (b *Backend) runSteps() {
	for s, ok := b.Steps.Pop(); ok; s, ok = b.Steps.Pop() {
		s.Step.Err = b.device.run(s.Batch, s.Step)
		s.Step.Finish()
	}
}

func (b *Backend) runCopies(q *backend.Queue[backend.CopyJob], move func([]backend.Region, []byte) error) {
	for j, ok := q.Pop(); ok; j, ok = q.Pop() {
		j.Run(b.now, move)
	}
}
