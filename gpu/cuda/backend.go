//go:build cuda

package cuda

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

// Options sets up a back end. Zero values are the defaults.
type Options struct {
	GPU            int                  // number of the card
	TokensPerBlock int                  // tokens of one KV block; default 32
	KVBlocks       int                  // KV blocks, allocated at once; default: enough for two full contexts
	WindowBlocks   func(blocks int) int // KV blocks of the layers of each window, beside so many of the others; nil: as many
	MaxSlots       int                  // sequences that can hold a slot; default 64
	Stage          backend.Stage        // layers to own; default: all of the model
	Deterministic  bool                 // float32 and sums that do not depend on the batch, at a fraction of the speed
	NarrowKV       bool                 // KV gets eight bits an element, and a scale for each head
	NarrowWeights  bool                 // the matrices of layers get eight bits a weight (E4M3) and a scale for each output
	CacheDir       string               // folder of compiled kernels; "": they are compiled at each start
	MaxTokens      int                  // query tokens of a step, for which memory is set aside; default 2048
	MemoryFraction float64              // of the card's memory, for all that this back end holds; KV gets what is left. 0: see KVBlocks
	Now            func() int64         // the process's steady clock in ns; must be given
}

// Backend implements backend.Backend.
type Backend struct {
	backend.Inbox
	info backend.Info
	card string
	*pins
	pulls  *backend.Queue[func(*importer, error)]
	events backend.EventSets // of the flights; the launcher takes them, the finisher reads them
	shared backend.Shared    // KV for other processes; without a kind: it is not shared
	now    func() int64
	ended  sync.WaitGroup
	clock  cardClock
	mu     sync.Mutex // guards err
	err    error      // of freeing the device
}

// New puts a model on a card. The model may be closed once New has returned.
func New(m *model.Model, o Options) (*Backend, error) {
	info, err := describe(m, &o)
	if err != nil {
		return nil, err
	}
	b := &Backend{Inbox: backend.NewInbox(), pins: &pins{}, info: info, pulls: backend.NewQueue[func(*importer, error)](), now: o.Now}
	opened := make(chan error, 1)
	b.ended.Go(func() {
		runtime.LockOSThread() // never unlocked: the thread, bound to the card, ends with the goroutine
		b.launch(m, o, opened)
	})
	if err := <-opened; err != nil {
		b.ended.Wait()
		return nil, err
	}
	return b, nil
}

// describe fills the defaults of o and checks it.
func describe(m *model.Model, o *Options) (backend.Info, error) {
	c := &m.Config
	o.TokensPerBlock = cmp.Or(o.TokensPerBlock, 32)
	o.MaxTokens = cmp.Or(o.MaxTokens, 2048)
	if o.MemoryFraction < 0 || o.MemoryFraction > 1 {
		return backend.Info{}, fmt.Errorf("cuda: option MemoryFraction is %g; must be from 0 to 1", o.MemoryFraction)
	}
	if o.MemoryFraction > 0 && o.KVBlocks > 0 {
		return backend.Info{}, fmt.Errorf("cuda: options MemoryFraction is %g and KVBlocks %d; give one of them", o.MemoryFraction, o.KVBlocks)
	}
	if o.TokensPerBlock > 0 && o.MemoryFraction == 0 {
		o.KVBlocks = cmp.Or(o.KVBlocks, 2*((c.ContextLen+o.TokensPerBlock-1)/o.TokensPerBlock))
	}
	o.MaxSlots = cmp.Or(o.MaxSlots, 64)
	if o.Stage == (backend.Stage{}) {
		o.Stage.End = c.Layers
	}
	for _, f := range []struct {
		name  string
		value int
	}{{"TokensPerBlock", o.TokensPerBlock}, {"KVBlocks", max(o.KVBlocks, int(math.Ceil(o.MemoryFraction)))}, {"MaxSlots", o.MaxSlots}, {"MaxTokens", o.MaxTokens}} {
		if f.value < 1 {
			return backend.Info{}, fmt.Errorf("cuda: option %s is %d; must be at least 1", f.name, f.value)
		}
	}
	if o.Stage.First < 0 || o.Stage.First >= o.Stage.End || o.Stage.End > c.Layers {
		return backend.Info{}, fmt.Errorf("cuda: stage of layers [%d, %d); the model has %d", o.Stage.First, o.Stage.End, c.Layers)
	}
	if o.Now == nil {
		return backend.Info{}, errors.New("cuda: option Now is missing; must be the steady clock of the process")
	}
	if c.HeadSize > 256 || c.HeadSize%2 != 0 {
		return backend.Info{}, fmt.Errorf("cuda: heads of %d elements; must be even and at most 256", c.HeadSize)
	}
	if o.NarrowWeights && (o.Deterministic || c.Hidden%16 != 0 || c.Intermediate%16 != 0 || c.Heads*c.HeadSize%16 != 0) {
		return backend.Info{}, fmt.Errorf("cuda: weights of eight bits: deterministic is %t, products have %d, %d and %d inputs; want false and multiples of 16",
			o.Deterministic, c.Hidden, c.Intermediate, c.Heads*c.HeadSize)
	}
	if o.NarrowKV && (o.Deterministic || c.HeadSize%16 != 0) {
		return backend.Info{}, fmt.Errorf("cuda: KV of eight bits: deterministic is %t, heads have %d elements; want false and a multiple of 16", o.Deterministic, c.HeadSize)
	}
	kv, numerics := "bf16", "cuda-bf16-cublaslt"
	if o.NarrowWeights {
		numerics = "cuda-fp8-weights"
	}
	if o.NarrowKV {
		kv, numerics = narrowType, numerics+"-fp8-kv"
	}
	if o.Deterministic {
		kv, numerics = "f32", "cuda-f32"
	}
	if o.WindowBlocks == nil {
		o.WindowBlocks = func(blocks int) int { return blocks }
	}
	var windows []backend.Window // of stages that are cut: all their layers are one group
	if o.Stage == (backend.Stage{End: c.Layers}) {
		windows = backend.WindowsOf(c.Windows, o.Stage, c.ContextLen, o.WindowBlocks(o.KVBlocks))
	}
	if len(windows)+1 >= maxGroups || c.Layers >= maxGroupLayers {
		return backend.Info{}, fmt.Errorf("cuda: %d layers with %d windows; must be below %d and %d", c.Layers, len(windows), maxGroupLayers, maxGroups-1)
	}
	return backend.Info{
		Device: "cuda", ModelHash: m.Hash, Vocab: c.Vocab, ContextLen: c.ContextLen, Layers: c.Layers, Stage: o.Stage,
		Hidden: c.Hidden, KVHeads: c.KVHeads, HeadSize: c.HeadSize, KVType: kv, RoPE: c.RoPE.String(),
		TokensPerBlock: o.TokensPerBlock, KVBlocks: o.KVBlocks, Windows: windows, MaxSlots: o.MaxSlots, Numerics: numerics, DeviceClock: "mono",
	}, nil
}

// Info implements backend.Backend.
func (b *Backend) Info() backend.Info { return b.info }

// Card is the name of the card.
func (b *Backend) Card() string { return b.card }

// Close implements backend.Backend.
func (b *Backend) Close() error {
	b.End()
	b.pulls.Close()
	b.ended.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.err
}

// launch is the launcher goroutine: it opens the device, starts its kin, queues steps, and frees all when they have ended.
func (b *Backend) launch(m *model.Model, o Options, opened chan<- error) {
	c, err := openContext(o.GPU)
	if err != nil {
		opened <- err
		return
	}
	d, err := newDevice(c, b.pins, m, b.info, o)
	if err != nil {
		opened <- fmt.Errorf("%s: %w", c.name, errors.Join(err, b.pins.close(c), c.close()))
		return
	}
	b.card, b.info = c.name, d.info
	b.clock.id = cardID(c.uuid)
	if len(d.kv) == 1 {
		b.share(c, d.kv[0])
	}
	asked, closing := make(chan error, 1), make(chan struct{})
	var asking sync.WaitGroup
	asking.Go(func() { b.ask(c, d.kernels, asked, closing) })
	if err := <-asked; err != nil {
		asking.Wait()
		opened <- fmt.Errorf("%s: ask its clock: %w", c.name, errors.Join(err, b.pins.close(c), d.close(), c.close()))
		return
	}
	ready, queued := make(chan *flight, flights), make(chan *flight, flights)
	for i := range flights {
		f, flightErr := newFlight(c, i)
		err = firstOf(err, flightErr)
		ready <- f
	}
	if err != nil {
		close(closing)
		asking.Wait()
		close(ready)
		opened <- fmt.Errorf("%s: %w", c.name, errors.Join(err, closeAll(ready), b.pins.close(c), d.close(), c.close()))
		return
	}
	opened <- nil
	var kin sync.WaitGroup
	kin.Go(func() { b.finish(c, ready, queued) })
	kin.Go(func() { b.copyAll(c, d, b.Out, true) })
	kin.Go(func() { b.copyAll(c, d, b.In, false) })
	kin.Go(func() { b.pullAll(c, d) })
	for s, ok := b.Steps.Pop(); ok; s, ok = b.Steps.Pop() {
		f := <-ready // the finisher gives one back when the oldest step has ended
		f.batch, f.step = s.Batch, s.Step
		if f.events, f.err = b.events.Take(f.batch.Iter); f.err == nil {
			if f.err = d.run(f); f.err != nil {
				_ = errors.Join(d.uploads.wait(), d.wait()) // what was queued of it may still use the flight's memory; its error is in f.err, or comes with the next step
			}
		}
		queued <- f
	}
	close(queued)
	kin.Wait()
	err = b.pins.close(c)
	close(closing)
	asking.Wait()
	close(ready)
	err = errors.Join(err, closeAll(ready))
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = errors.Join(b.err, err, d.close(), c.close())
}

// closeAll frees what the flights hold; none is on its way any more.
func closeAll(ready <-chan *flight) error {
	var err error
	for f := range ready {
		err = firstOf(err, f.close())
	}
	return err
}

// finish is the finisher goroutine.
func (b *Backend) finish(c *context, ready chan<- *flight, queued <-chan *flight) {
	runtime.LockOSThread()
	err := c.current()
	clock := &stamper{now: b.now, clock: &b.clock}
	for f := range queued {
		f.err = firstOf(f.err, err)
		f.finish(b.info, clock)
		f.batch, f.step = nil, nil
		ready <- f
	}
}

// copyAll is a copier's goroutine.
func (b *Backend) copyAll(c *context, d *device, q *backend.Queue[backend.CopyJob], out bool) {
	runtime.LockOSThread()
	var k *copier
	err := c.current()
	if err == nil {
		k, err = newCopier(c, d, b.pins)
	}
	for j, ok := q.Pop(); ok; j, ok = q.Pop() {
		j.Run(b.now, func(regions []backend.Region, buf []byte) error {
			if err != nil { // of opening the copier
				return err
			}
			return k.run(regions, buf, out)
		})
	}
	if k != nil {
		err = k.close()
	}
	b.fail(err)
}

// fail keeps an error of freeing the device for Close.
func (b *Backend) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.err = errors.Join(b.err, err)
}
