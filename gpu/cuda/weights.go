//go:build cuda

package cuda

import (
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"slices"
	"sync"
	"unsafe"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

// matrix is a weight on the card: (n outputs, k inputs).
type matrix struct {
	at     address
	n, k   int
	scales address // of the outputs, (n) float32: the elements are of eight bits; 0: they have the type of activations
}

// layer holds one layer's weights; what the model does not have is 0.
type layer struct {
	attnNorm, mlpNorm     address
	qkv, o, gateUp, down  matrix // qkv: Q, K and V one below the other; gateUp: gate, then up
	qkvBias, qNorm, kNorm address
	window                int
}

// weights is the model on the card, in one piece of its memory.
type weights struct {
	embed, norm address
	head        matrix
	layers      []layer
	turns       address // (position, head size / 2) of (cos, sin) in float32
	at          address
	bytes       int
}

// loader says what of a model goes where on the card; carriers beside it bring it there, piece by piece. One goroutine owns it.
type loader struct {
	bf16, eight bool                        // eight: the matrices of layers get eight bits a weight
	next        address                     // where there is room
	pieces      chan<- func(*carrier) error // nil: room is counted only
}

// carrier fills its two halves in turn and sends them to the card: one is filled while the other is on its way. One processor alone
// is slower than the link to the card, so there are several carriers, on one stream. One goroutine owns each.
type carrier struct {
	*launcher
	bf16   bool
	halves [2]half
	turn   int
	wide   buffer // rows that are to become narrow
}

// half is memory that pieces go through.
type half struct {
	buf  []byte
	gone event // comes to pass when the card has the last piece
}

const (
	maxCarriers = 8                                       // are faster than the link
	pieceBytes  = pinBytes * pinCount / (2 * maxCarriers) // a multiple of every element size
)

// carry starts carriers for what comes out of pieces, and gives what waits for their end. Pieces go through memory that is pinned, else the driver copies once more.
func carry(la *launcher, memory []byte, bf16 bool, pieces <-chan func(*carrier) error) (wait func() error) {
	n := min(runtime.GOMAXPROCS(0), maxCarriers)
	if memory == nil {
		memory = make([]byte, n*2*pieceBytes)
	}
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range errs {
		c := &carrier{launcher: newLauncher(la.stream, la.kernels), bf16: bf16}
		for h := range c.halves {
			c.halves[h].buf, memory = memory[:pieceBytes], memory[pieceBytes:]
		}
		all.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread, bound to the card, ends with the goroutine
			err := c.open()
			for piece := range pieces {
				if err == nil {
					err = piece(c)
				}
			}
			errs[i] = errors.Join(err, c.close())
		})
	}
	return func() error {
		all.Wait()
		return errors.Join(errs...)
	}
}

func (c *carrier) open() error {
	err := c.current()
	for i := range c.halves {
		if err == nil {
			c.halves[i].gone, err = c.newEvent()
		}
	}
	return err
}

// close waits for the pieces that are on their way.
func (c *carrier) close() error {
	err := firstOf(c.wait(), c.free(c.wide.at))
	for _, h := range c.halves {
		if h.gone != 0 {
			err = firstOf(err, c.do("cuEventDestroy_v2", uintptr(h.gone)))
		}
	}
	return err
}

// send brings n bytes to the card, which fill writes.
func (c *carrier) send(to address, n int, fill func(buf []byte)) error {
	h := c.halves[c.turn]
	c.turn = 1 - c.turn
	if err := c.waitEvent(h.gone); err != nil { // at once, if it was never sent
		return err
	}
	fill(h.buf[:n])
	return firstOf(c.upload(to, uintptr(unsafe.Pointer(&h.buf[0])), n), c.record(h.gone))
}

func elementSize(bf16 bool) int {
	if bf16 {
		return 2
	}
	return 4
}

// stack puts tensors one behind the other; nil ones are left out. 0: there are none.
func (l *loader) stack(tensors ...*model.Tensor) address {
	n, size := 0, elementSize(l.bf16)
	for _, t := range tensors {
		if t != nil {
			n += t.Elements()
		}
	}
	if n == 0 {
		return 0
	}
	at := l.room(n * size)
	to := at
	for _, t := range tensors {
		if t != nil {
			l.tensor(t, to)
			to += address(t.Elements() * size)
		}
	}
	return at
}

// room is memory of the card for weights.
func (l *loader) room(bytes int) address {
	const align = 256 // as the driver does
	at := l.next
	l.next += address((bytes + align - 1) / align * align)
	return at
}

// bring gives a piece to the carriers.
func (l *loader) bring(piece func(*carrier) error) {
	if l.pieces != nil {
		l.pieces <- piece
	}
}

// wide puts matrices one below the other in the element type of the mode.
func (l *loader) wide(tensors ...*model.Tensor) matrix {
	m := matrix{at: l.stack(tensors...), k: tensors[0].Shape[1]}
	for _, t := range tensors {
		m.n += t.Shape[0]
	}
	return m
}

// matrix is a layer's.
func (l *loader) matrix(tensors ...*model.Tensor) matrix {
	if l.eight {
		return l.narrow(tensors...)
	}
	return l.wide(tensors...)
}

// tensor sends one tensor, converted to the element type of the mode.
func (l *loader) tensor(t *model.Tensor, to address) {
	size := elementSize(l.bf16)
	for _, data := range cut(t.Data, pieceBytes/size*t.Type.Size()) {
		n, at := len(data)/t.Type.Size()*size, to
		l.bring(func(c *carrier) error {
			return c.send(at, n, func(buf []byte) { convert(buf, data, t.Type, c.bf16) })
		})
		to += address(n)
	}
}

// cut cuts data into pieces of at most n bytes.
func cut(data []byte, n int) [][]byte { return slices.Collect(slices.Chunk(data, n)) }

// convert writes src as bfloat16 or float32.
func convert(dst, src []byte, t model.DType, bf16 bool) {
	if bf16 && t == model.BF16 || !bf16 && t == model.F32 {
		copy(dst, src)
		return
	}
	size := t.Size()
	for i := range len(src) / size {
		var v float32
		switch t {
		case model.F32:
			v = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		case model.F16:
			v = model.F16ToFloat32(binary.LittleEndian.Uint16(src[2*i:]))
		default:
			v = model.BF16ToFloat32(binary.LittleEndian.Uint16(src[2*i:]))
		}
		if bf16 {
			binary.LittleEndian.PutUint16(dst[2*i:], model.Float32ToBF16(v))
		} else {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
		}
	}
}

// loadWeights copies the stage's part of the model through pinned memory; l says what becomes of the numbers. Weights that come with an
// error are to be freed, too.
func loadWeights(la *launcher, p *pins, m *model.Model, st backend.Stage, l loader) (*weights, error) {
	count := l
	count.place(m, st)
	bytes := int(count.next)
	at, err := la.alloc(bytes)
	if err != nil {
		return &weights{}, err
	}
	pieces := make(chan func(*carrier) error, maxCarriers)
	wait := carry(la, p.whole(), l.bf16, pieces)
	l.next, l.pieces = at, pieces
	w := l.place(m, st)
	w.at, w.bytes = at, bytes
	close(pieces)
	return w, wait()
}

// place gives a place to all that the stage has.
func (l *loader) place(m *model.Model, st backend.Stage) *weights {
	c, w, first, end := &m.Config, &weights{}, st.First, st.End
	if first == 0 {
		w.embed = l.stack(m.Embed)
	}
	row := 4 * c.HeadSize // bytes of a position's turns
	w.turns = l.room(c.ContextLen * row)
	for i := first; i < end; i++ {
		// Turns are computed: a layer's share of them with each layer, or the link would wait for all carriers.
		from, to := c.ContextLen*(i-first)/(end-first), c.ContextLen*(i+1-first)/(end-first)
		l.rotations(c, w.turns+address(from*row), from, to)
		t := &m.Layers[i]
		w.layers = append(w.layers, layer{
			attnNorm: l.stack(t.AttnNorm), mlpNorm: l.stack(t.MLPNorm), qkv: l.matrix(t.Q, t.K, t.V), o: l.matrix(t.O),
			gateUp: l.matrix(t.Gate, t.Up), down: l.matrix(t.Down), qkvBias: l.stack(t.QBias, t.KBias, t.VBias),
			qNorm: l.stack(t.QNorm), kNorm: l.stack(t.KNorm), window: c.Windows[i],
		})
	}
	if end == c.Layers {
		w.norm = l.stack(m.Norm)
		if m.Head == m.Embed && first == 0 {
			w.head.at, w.head.n, w.head.k = w.embed, c.Vocab, c.Hidden
		} else {
			w.head = l.wide(m.Head)
		}
	}
	return w
}

// rotations computes the angles of positions [from, end) as the models were trained: position times frequency in float32.
func (l *loader) rotations(c *model.Config, at address, from, end int) {
	freq := c.RoPE.InvFreq(c.HeadSize)
	row := 8 * len(freq) // bytes of a position
	for per := pieceBytes / row; from < end; from += per {
		first, last, to := from, min(from+per, end), at
		l.bring(func(k *carrier) error {
			return k.send(to, (last-first)*row, func(buf []byte) { angles(words[float32](buf), freq, first, last, c.RoPE.Scale) })
		})
		at += address((last - first) * row)
	}
}

// angles writes (cos, sin) of positions [from, to).
func angles(out []float32, freq []float64, from, to int, scale float64) {
	for pos := from; pos < to; pos++ {
		for _, f := range freq {
			sin, cos := math.Sincos(float64(float32(pos) * float32(f)))
			out[0], out[1] = float32(cos*scale), float32(sin*scale)
			out = out[2:]
		}
	}
}
