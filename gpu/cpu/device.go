package cpu

import (
	"fmt"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
	"meridian.internal/gpu/sample"
)

// device is everything that the device goroutine owns.
type device struct {
	events backend.EventSets
	info   backend.Info
	config *model.Config
	ks     *kernels
	pool   *pool
	now    func() int64
	kv     *kvMemory
	rope   *rope

	embed  *model.Tensor
	layers []layer // of the stage
	norm   []float32
	head   weight

	slots   []slot
	scratch []scratch // one per worker

	checks int64 // batches checked
	rows   []row // of the step, in the order of its entries
	// Activations of the step; matrix.resize gives them its rows.
	hidden matrix // (rows, hidden): the residual stream
	normed matrix // (rows, hidden): input of the products
	sum    matrix // (rows, hidden): what a product adds to the stream
	query  matrix // (rows, heads * head size), then the output of attention
	key    matrix // (rows, KV heads * head size)
	value  matrix // (rows, KV heads * head size)
	gate   matrix // (rows, intermediate)
	up     matrix // (rows, intermediate)
	logits matrix // (wanted rows, vocab)

	parts []productPart
	tasks []attentionTask
}

// slot is the state of one sequence.
type slot struct {
	sample sample.State
	check  int64 // device.checks when a batch last named it
	last   int32 // the token that the last step sampled, the next query token if an entry brings none
}

// row is one query token of the step.
type row struct {
	entry  int // index in the batch
	pos    int // position in the sequence
	wanted bool
}

// scratch is what one worker needs for itself.
type scratch struct {
	sample  sample.Scratch
	head    []float32 // (pad(head size)): one head, padded
	query   matrix    // (rows of an attention tile, pad(head size))
	scores  matrix    // (rows of an attention tile, visible positions)
	acc     matrix    // (query heads of one KV head, pad(head size))
	inverse []float32 // (query heads of one KV head): capacity only
}

// layer holds one layer's weights as the kernels read them.
type layer struct {
	attnNorm, mlpNorm          []float32 // (hidden)
	q, k, v, o, gate, up, down weight
	qBias, kBias, vBias        []float32 // nil: none
	qNorm, kNorm               []float32 // (head size), nil: none
	window                     int       // tokens; 0: all
}

func newDevice(m *model.Model, info backend.Info, ks *kernels, o Options) *device {
	c := &m.Config
	d := &device{
		info: info, config: c, ks: ks, pool: newPool(o.Threads), now: o.Now, kv: newKVMemory(info), rope: newRope(c),
		embed: m.Embed, slots: make([]slot, info.MaxSlots), scratch: make([]scratch, o.Threads),
		hidden: matrix{cols: pad(c.Hidden)}, normed: matrix{cols: pad(c.Hidden)}, sum: matrix{cols: pad(c.Hidden)},
		query: matrix{cols: pad(c.Heads * c.HeadSize)}, key: matrix{cols: pad(c.KVHeads * c.HeadSize)},
		value: matrix{cols: pad(c.KVHeads * c.HeadSize)}, gate: matrix{cols: pad(c.Intermediate)},
		up: matrix{cols: pad(c.Intermediate)}, logits: matrix{cols: c.Vocab},
	}
	for i := range d.scratch {
		h := pad(c.HeadSize)
		d.scratch[i] = scratch{head: make([]float32, h), query: matrix{cols: h}, acc: matrix{cols: h}, inverse: make([]float32, 0, c.Heads/c.KVHeads)}
	}
	for i := info.Stage.First; i < info.Stage.End; i++ {
		d.layers = append(d.layers, newLayer(&m.Layers[i], c.Windows[i]))
	}
	if d.samples() {
		d.norm, d.head = m.Norm.Float32(), newWeight(m.Head)
	}
	return d
}

func newLayer(l *model.Layer, window int) layer {
	return layer{
		attnNorm: l.AttnNorm.Float32(), mlpNorm: l.MLPNorm.Float32(),
		q: newWeight(l.Q), k: newWeight(l.K), v: newWeight(l.V), o: newWeight(l.O),
		gate: newWeight(l.Gate), up: newWeight(l.Up), down: newWeight(l.Down),
		qBias: l.QBias.Float32(), kBias: l.KBias.Float32(), vBias: l.VBias.Float32(),
		qNorm: l.QNorm.Float32(), kNorm: l.KNorm.Float32(), window: window,
	}
}

// samples tells whether the stage ends at the head.
func (d *device) samples() bool { return d.info.Stage.End == d.info.Layers }

// check refuses a batch that would read or write outside what there is. It names the entry, so that a broken executor is
// found; nothing of the batch has run then.
func (d *device) check(b *backend.Batch) error {
	for _, a := range b.Assign {
		if a.Slot < 0 || a.Slot >= len(d.slots) {
			return fmt.Errorf("cpu: step %d assigns slot %d, there are %d", b.Iter, a.Slot, len(d.slots))
		}
	}
	for _, c := range b.Copies {
		if c.Group < 0 || c.Group >= len(d.kv.groups) {
			return fmt.Errorf("cpu: step %d copies a KV block of group %d, there are %d", b.Iter, c.Group, len(d.kv.groups))
		}
		if n := d.kv.groups[c.Group].blocks; min(c.From, c.To) < 0 || int(max(c.From, c.To)) >= n {
			return fmt.Errorf("cpu: step %d copies KV block %d to %d, there are %d", b.Iter, c.From, c.To, n)
		}
	}
	rows := 0
	d.checks++
	for i := range b.Entries {
		if err := b.Entries[i].Check(&d.info); err != nil {
			return fmt.Errorf("cpu: step %d, entry %d: %w", b.Iter, i, err)
		}
		s := &d.slots[b.Entries[i].Slot]
		if s.check == d.checks { // entries are sampled in parallel
			return fmt.Errorf("cpu: step %d, entry %d: slot %d is in another entry too", b.Iter, i, b.Entries[i].Slot)
		}
		s.check = d.checks
		rows += b.Entries[i].Queries()
	}
	if _, err := backend.HiddenOf[backend.HostHidden](b, &d.info, rows); err != nil {
		return fmt.Errorf("cpu: step %d: %w", b.Iter, err)
	}
	return nil
}
