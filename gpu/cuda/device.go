//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sort"
	"sync"
	"unsafe"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
	"meridian.internal/shared/infer"
)

// device is everything that the launcher goroutine owns.
type device struct {
	*launcher
	info    backend.Info
	now     func() int64
	config  *model.Config
	bf16    bool
	blas    *blas // nil in deterministic mode
	weights *weights
	kv      []address       // by group of layers
	places  []backend.Place // of the layers of the stage
	scales  address         // of KV of eight bits: (layer, K then V, head) float32; 0: it has none
	slots   []infer.Sampling
	graphs  map[graphKey]uintptr
	onward  *hiddenPool      // for the next stage
	reached map[uintptr]bool // contexts of other cards that were made reachable if they can be
	desc    description
	step    int64 // batches checked
	most    int   // rows of a step that is full of prompts
	checked []int64

	counts, last address // (slot, vocab), (slot)
	merged       address // (rows, KV heads): splits of attention that have ended
	fixed        []address
	metas        [flights]buffer // descriptions of steps, one for each flight
	meta         *buffer         // that of the step that is being queued
	uploads      *stream         // by which they come, beside the step before
	hidden       buffer          // (rows, hidden) float32: the residual stream
	normed       buffer          // (rows, hidden)
	qkv          buffer          // (rows, QKV)
	mixed        buffer          // (rows, heads * head size): output of attention
	gateUp       buffer          // (rows, 2 * intermediate)
	gated        buffer          // (rows, intermediate)
	partial      buffer          // (rows, heads, splits, head size + 2) float32
	logits       buffer          // (wanted, vocab) float32
	work         buffer          // (entries, vocab) float32
	wide         buffer          // a matrix of eight bits in bfloat16, for products of many rows
	squares      buffer          // (rows, hidden / 16) float32, of the fused products
	peaks        buffer          // (wanted, slices) of 8 bytes
	logprobs     buffer          // (wanted, 1 + maxTop, 2)
}

const (
	peakSlices  = 32 // of a row of logits, in which the most likely tokens are found
	maxSplits   = 32
	resultsHead = 32 // bytes
	logprobSize = 8 * (1 + maxTop)
)

// elementSize is that of activations.
func (d *device) elementSize() int {
	if d.bf16 {
		return 2
	}
	return 4
}

// samples tells whether the stage ends at the head.
func (d *device) samples() bool { return d.info.Stage.End == d.info.Layers }

// countsBytes is the size of what the sampler remembers of the sequences.
func (d *device) countsBytes() int {
	if !d.samples() {
		return 0
	}
	return 4 * d.info.MaxSlots * d.info.Vocab
}

func newDevice(c *context, p *pins, m *model.Model, info backend.Info, o Options) (_ *device, err error) {
	var pinned sync.WaitGroup
	defer pinned.Wait()
	pinned.Go(func() { // while kernels are read or compiled
		runtime.LockOSThread()
		if c.current() == nil {
			p.open(c)
		}
	})
	s, err := c.newStream()
	if err != nil {
		return nil, err
	}
	k, err := c.load(&m.Config, info, o)
	if err != nil {
		return nil, errors.Join(err, s.do("cuStreamDestroy_v2", s.handle))
	}
	d := &device{
		launcher: newLauncher(s, k), weights: &weights{}, info: info, now: o.Now, config: &m.Config, bf16: !o.Deterministic,
		most: o.MaxTokens, slots: make([]infer.Sampling, info.MaxSlots), checked: make([]int64, info.MaxSlots), graphs: map[graphKey]uintptr{},
		onward: &hiddenPool{context: c, least: 4 * o.MaxTokens * info.Hidden}, reached: map[uintptr]bool{},
	}
	d.meta = &d.metas[0]
	defer func() { // another device of this process may keep the card's context, and with it what would be left here
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if d.uploads, err = c.newStream(); err != nil {
		return nil, err
	}
	if d.bf16 {
		if d.blas, err = openBLAS(c); err != nil {
			return nil, err
		}
	}
	pinned.Wait()
	if d.weights, err = loadWeights(d.launcher, p, m, info.Stage, loader{bf16: d.bf16, eight: k.has.narrow}); err != nil {
		return nil, fmt.Errorf("load the weights: %w", err)
	}
	if o.MemoryFraction > 0 {
		if err := d.fit(o); err != nil {
			return nil, err
		}
		info = d.info
	}
	for _, f := range []struct {
		to *address
		n  int
	}{{&d.counts, d.countsBytes()}, {&d.last, 4 * info.MaxSlots},
		{&d.merged, 4 * maxGraphRows * m.Config.KVHeads}} {
		if *f.to, err = c.alloc(f.n); err != nil {
			return nil, err
		}
		d.fixed = append(d.fixed, *f.to)
		if err := s.zero(*f.to, f.n); err != nil {
			return nil, err
		}
	}
	d.places = info.Places()
	if err := d.allocKV(); err != nil {
		return nil, err
	}
	if info.KVType == narrowType {
		if err := d.scaleKV(); err != nil {
			return nil, err
		}
	}
	if err = s.wait(); err != nil {
		return nil, err
	}
	return d, nil
}

// fit sets aside what a step of MaxTokens needs, and counts the KV blocks that fit into the rest of the card's part.
func (d *device) fit(o Options) error {
	d.desc.words = make([]int32, 1<<16)
	sampled := 0 // rows
	if d.samples() {
		sampled = d.info.MaxSlots
	}
	if err := d.reserve(o.MaxTokens, sampled, sampled); err != nil {
		return err
	}
	var free, total uint64
	if err := d.do("cuMemGetInfo_v2", uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total))); err != nil {
		return err
	}
	held := d.weights.bytes + d.countsBytes() + blasWorkspace + contextBytes
	for _, b := range d.buffers() {
		held += b.size
	}
	if !d.samples() {
		held += hiddenAhead * d.onward.least
	}
	room := min(int(o.MemoryFraction*float64(total))-held, int(free)-marginBytes)
	i := &d.info
	i.KVBlocks = sort.Search(math.MaxInt32, func(n int) bool { return kvBytes(i, n+1, o.WindowBlocks(n+1)) > room })
	for w := range i.Windows {
		i.Windows[w].Blocks = o.WindowBlocks(i.KVBlocks)
	}
	if need := (i.ContextLen + i.TokensPerBlock - 1) / i.TokensPerBlock; i.KVBlocks < need {
		return fmt.Errorf("memory fraction %g of %d bytes, of which %d are free: %d are left for KV after %d for model and activations; one context of %d tokens needs %d",
			o.MemoryFraction, total, free, max(room, 0), held, i.ContextLen, kvBytes(i, need, o.WindowBlocks(need)))
	}
	return nil
}

const (
	contextBytes = 600 << 20 // what the driver and the libraries hold for a process, about
	marginBytes  = 256 << 20 // that stay free on the card
)

func (d *device) buffers() []*buffer {
	return []*buffer{
		&d.metas[0], &d.metas[1], &d.hidden, &d.normed, &d.qkv, &d.mixed, &d.gateUp, &d.gated, &d.partial, &d.logits, &d.work, &d.squares, &d.peaks, &d.logprobs, &d.wide,
	}
}

// wideBytes is the size of the largest matrix of a layer, if a step of so many rows widens it.
func (d *device) wideBytes(rows int) int {
	if !d.kernels.has.narrow || rows <= d.mostNarrow() {
		return 0
	}
	l := &d.weights.layers[0]
	return 2 * max(l.qkv.n*l.qkv.k, l.o.n*l.o.k, l.gateUp.n*l.gateUp.k, l.down.n*l.down.k)
}

// reserve makes room for the described step. Buffers that move leave graphs behind that know their old place.
func (d *device) reserve(rows, wanted, entries int) error {
	c, e := d.config, d.elementSize()
	qkv := (c.Heads + 2*c.KVHeads) * c.HeadSize
	sizes := []struct {
		b *buffer
		n int
	}{
		{&d.metas[0], 4 * len(d.desc.words)}, {&d.metas[1], 4 * len(d.desc.words)},
		{&d.hidden, 4 * rows * c.Hidden}, {&d.normed, e * max(rows, wanted, maxFused) * c.Hidden}, {&d.qkv, e * rows * qkv},
		{&d.mixed, e * rows * c.Heads * c.HeadSize}, {&d.gateUp, e * rows * 2 * c.Intermediate},
		{&d.gated, e * rows * c.Intermediate}, {&d.partial, 4 * min(rows, maxGraphRows) * c.Heads * maxSplits * (c.HeadSize + 2)},
		{&d.logits, 4 * wanted * c.Vocab}, {&d.work, 4 * entries * c.Vocab}, {&d.squares, 4 * maxFused * c.Hidden / 16}, {&d.peaks, 8 * peakSlices * wanted},
		{&d.logprobs, logprobSize * wanted}, {&d.wide, d.wideBytes(rows)},
	}
	grows := false
	for _, s := range sizes {
		grows = grows || s.n > s.b.size
	}
	if !grows {
		return nil
	}
	if err := d.wait(); err != nil {
		return err
	}
	d.dropGraphs()
	for _, s := range sizes {
		if s.n > s.b.size {
			if _, err := d.grow(s.b, s.n+s.n/4); err != nil { // some more, so that it does not happen at each step
				return err
			}
		}
	}
	return d.err
}

func (d *device) dropGraphs() {
	for key, g := range d.graphs {
		d.keep(d.do("cuGraphExecDestroy", g))
		delete(d.graphs, key)
	}
}

// close frees what the device holds; nothing is queued any more.
func (d *device) close() error {
	d.dropGraphs()
	for _, b := range d.buffers() {
		d.keep(d.free(b.at))
	}
	for _, a := range append(d.fixed, d.weights.at) {
		d.keep(d.free(a))
	}
	if d.blas != nil {
		d.keep(d.blas.close(d.context))
	}
	d.keep(d.onward.close())
	d.keep(d.do("cuModuleUnload", d.kernels.module))
	for _, s := range []*stream{d.uploads, d.stream} {
		if s != nil && s.handle != 0 {
			d.keep(d.do("cuStreamDestroy_v2", s.handle))
		}
	}
	return d.taken()
}
