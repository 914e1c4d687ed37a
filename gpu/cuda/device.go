//go:build cuda

package cuda

import (
	"fmt"
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
	kv      address
	slots   []infer.Sampling
	graphs  map[graphKey]uintptr
	desc    description
	step    int64 // batches checked
	checked []int64

	counts, last address // (slot, vocab), (slot)
	merged       address // (rows, KV heads): splits of attention that have ended
	fixed        []address
	meta         buffer // the description of the step
	hidden       buffer // (rows, hidden) float32: the residual stream
	normed       buffer // (rows, hidden)
	qkv          buffer // (rows, QKV)
	mixed        buffer // (rows, heads * head size): output of attention
	gateUp       buffer // (rows, 2 * intermediate)
	gated        buffer // (rows, intermediate)
	partial      buffer // (rows, heads, splits, head size + 2) float32
	logits       buffer // (wanted, vocab) float32
	work         buffer // (entries, vocab) float32
	squares      buffer // (rows, hidden / 16) float32, of the fused products
	peaks        buffer // (wanted, slices) of 8 bytes
	logprobs     buffer // (wanted, 1 + maxTop, 2)
}

const (
	peakSlices  = 32 // of a row of logits, in which the most likely tokens are found
	maxSplits   = 32
	resultsHead = 32 // bytes
	logprobSize = 8 * (1 + maxTop)
)

// elementSize is that of weights, activations and KV.
func (d *device) elementSize() int { return backend.ElementSize(d.info.KVType) }

// samples tells whether the stage ends at the head.
func (d *device) samples() bool { return d.info.Stage.End == d.info.Layers }

// blockBytes is the size of one KV block of the stage.
func (d *device) blockBytes() int {
	return d.info.KVBytes(d.info.Stage.First, d.info.Stage.End) * d.info.TokensPerBlock
}

func newDevice(c *context, m *model.Model, info backend.Info, o Options, now func() int64) (*device, error) {
	s, err := c.newStream()
	if err != nil {
		return nil, err
	}
	k, err := c.load(&m.Config, info, o.CacheDir)
	if err != nil {
		return nil, err
	}
	d := &device{
		launcher: newLauncher(s, k), info: info, now: now, config: &m.Config, bf16: info.KVType == "bf16",
		slots: make([]infer.Sampling, info.MaxSlots), checked: make([]int64, info.MaxSlots), graphs: map[graphKey]uintptr{},
	}
	if d.bf16 {
		if d.blas, err = openBLAS(c); err != nil {
			return nil, err
		}
	}
	if d.weights, err = loadWeights(s, m, info.Stage.First, info.Stage.End, d.bf16); err != nil {
		return nil, err
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
	}{{&d.kv, d.blockBytes() * info.KVBlocks}, {&d.counts, 4 * info.MaxSlots * info.Vocab}, {&d.last, 4 * info.MaxSlots},
		{&d.merged, 4 * maxGraphRows * m.Config.KVHeads}} {
		if *f.to, err = c.alloc(f.n); err != nil {
			return nil, err
		}
		d.fixed = append(d.fixed, *f.to)
		if err := s.zero(*f.to, f.n); err != nil {
			return nil, err
		}
	}
	return d, s.wait()
}

// fit sets aside what a step of MaxTokens needs, and counts the KV blocks that fit into the rest of the card's part.
func (d *device) fit(o Options) error {
	d.desc.words = make([]int32, 1<<16)
	if err := d.reserve(o.MaxTokens, d.info.MaxSlots, d.info.MaxSlots); err != nil {
		return err
	}
	var free, total uint64
	if err := d.do("cuMemGetInfo_v2", uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total))); err != nil {
		return err
	}
	held := d.weights.bytes + 4*d.info.MaxSlots*(d.info.Vocab+1) + blasWorkspace + contextBytes
	for _, b := range d.buffers() {
		held += b.size
	}
	room := min(int(o.MemoryFraction*float64(total))-held, int(free)-marginBytes)
	d.info.KVBlocks = room / d.blockBytes()
	if need := (d.info.ContextLen + d.info.TokensPerBlock - 1) / d.info.TokensPerBlock; d.info.KVBlocks < need {
		return fmt.Errorf("memory fraction %g of %d bytes, of which %d are free: %d are left for KV after %d for model and activations; one context of %d tokens needs %d",
			o.MemoryFraction, total, free, max(room, 0), held, d.info.ContextLen, need*d.blockBytes())
	}
	return nil
}

const (
	contextBytes = 600 << 20 // what the driver and the libraries hold for a process, about
	marginBytes  = 256 << 20 // that stay free on the card
)

func (d *device) buffers() []*buffer {
	return []*buffer{
		&d.meta, &d.hidden, &d.normed, &d.qkv, &d.mixed, &d.gateUp, &d.gated, &d.partial, &d.logits, &d.work, &d.squares, &d.peaks, &d.logprobs,
	}
}

// reserve makes room for the described step. Buffers that move leave graphs behind that know their old place.
func (d *device) reserve(rows, wanted, entries int) error {
	c, e := d.config, d.elementSize()
	qkv := (c.Heads + 2*c.KVHeads) * c.HeadSize
	sizes := []struct {
		b *buffer
		n int
	}{
		{&d.meta, 4 * len(d.desc.words)},
		{&d.hidden, 4 * rows * c.Hidden}, {&d.normed, e * max(rows, wanted, maxThin) * c.Hidden}, {&d.qkv, e * rows * qkv},
		{&d.mixed, e * rows * c.Heads * c.HeadSize}, {&d.gateUp, e * rows * 2 * c.Intermediate},
		{&d.gated, e * rows * c.Intermediate}, {&d.partial, 4 * min(rows, maxGraphRows) * c.Heads * maxSplits * (c.HeadSize + 2)},
		{&d.logits, 4 * wanted * c.Vocab}, {&d.work, 4 * entries * c.Vocab}, {&d.squares, 4 * maxThin * c.Hidden / 16}, {&d.peaks, 8 * peakSlices * wanted},
		{&d.logprobs, logprobSize * wanted},
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
	for _, a := range append(d.fixed, d.weights.all...) {
		d.keep(d.free(a))
	}
	if d.blas != nil {
		d.keep(d.free(d.blas.workspace))
		for _, e := range d.blas.times {
			d.keep(d.do("cuEventDestroy_v2", uintptr(e)))
		}
		d.keep(status("cublasLtDestroy", d.blas.call("cublasLtDestroy", d.blas.handle)))
	}
	d.keep(d.do("cuModuleUnload", d.kernels.module))
	d.keep(d.do("cuStreamDestroy_v2", d.handle))
	return d.taken()
}
