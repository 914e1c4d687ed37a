//go:build cuda

package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync"
	"syscall"
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

// weights is the model on the card.
type weights struct {
	embed, norm address
	head        matrix
	layers      []layer
	turns       address // (position, head size / 2) of (cos, sin) in float32
	all         []address
	bytes       int
}

// loader says what of a model goes where on the card; carriers beside it bring it there, piece by piece. One goroutine owns it.
type loader struct {
	*launcher
	bf16   bool
	pieces chan<- func(*carrier) error
	all    []address
	bytes  int
	err    error
}

// carrier fills its two halves of a pinned page in turn and sends them to the card: one is filled while the other is on its way. One processor alone
// is slower than the link to the card, so there are several carriers, on one stream. One goroutine owns each.
type carrier struct {
	*launcher
	bf16   bool
	page   []byte
	pinned bool     // else the driver copies once more
	gone   [2]event // comes to pass when the card has the last piece of a half
	turn   int
	wide   buffer // rows that are to become narrow
}

const (
	maxCarriers = 8 // some processors are faster than the link; each costs pinned memory
	pageBytes   = 2 << 20
	pieceBytes  = pageBytes / 2 // on its way; a multiple of every element size
)

// carry starts carriers for what comes out of pieces, and gives what waits for their end.
func carry(la *launcher, bf16 bool, pieces <-chan func(*carrier) error) (wait func() error, err error) {
	n := min(runtime.GOMAXPROCS(0), maxCarriers)
	memory, err := syscall.Mmap(-1, 0, (n+1)*pageBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("map memory for weights on their way: %w", err)
	}
	_ = syscall.Madvise(memory, syscall.MADV_HUGEPAGE) // large pages are pinned sooner
	pages := memory[-uintptr(unsafe.Pointer(&memory[0]))%pageBytes:]
	var all sync.WaitGroup
	errs := make([]error, n)
	for i := range errs {
		all.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread, bound to the card, ends with the goroutine
			c := &carrier{launcher: newLauncher(la.stream, la.kernels), bf16: bf16, page: pages[i*pageBytes:][:pageBytes]}
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
		return errors.Join(errors.Join(errs...), syscall.Munmap(memory))
	}, nil
}

// open pins the page.
func (c *carrier) open() error {
	err := c.current()
	for i := range c.gone {
		if err == nil {
			c.gone[i], err = c.newEvent()
		}
	}
	if err != nil {
		return err
	}
	clear(c.page) // here, not in the driver, which does one after the other
	c.pinned = c.register(c.page) == nil
	return nil
}

// close waits for the pieces that are on their way, and frees what they went through.
func (c *carrier) close() error {
	err := firstOf(c.wait(), c.free(c.wide.at))
	if c.pinned {
		err = firstOf(err, c.unregister(c.page))
	}
	for _, e := range c.gone {
		if e != 0 {
			err = firstOf(err, c.do("cuEventDestroy_v2", uintptr(e)))
		}
	}
	return err
}

// send brings n bytes to the card, which fill writes.
func (c *carrier) send(to address, n int, fill func(buf []byte)) error {
	half, gone := c.page[c.turn*pieceBytes:][:n], c.gone[c.turn]
	c.turn = 1 - c.turn
	if err := c.waitEvent(gone); err != nil { // at once, if it was never sent
		return err
	}
	fill(half)
	return firstOf(c.upload(to, uintptr(unsafe.Pointer(&half[0])), n), c.record(gone))
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
	if n == 0 || l.err != nil {
		return 0
	}
	at := l.room(n * size)
	to := at
	for _, t := range tensors {
		if t != nil && l.err == nil {
			l.tensor(t, to)
			to += address(t.Elements() * size)
		}
	}
	return at
}

// room is memory of the card for weights; 0: there is none.
func (l *loader) room(bytes int) address {
	if l.err != nil {
		return 0
	}
	at, err := l.alloc(bytes)
	if err != nil {
		l.err = err
		return 0
	}
	l.all, l.bytes = append(l.all, at), l.bytes+bytes
	return at
}

func (l *loader) matrix(tensors ...*model.Tensor) matrix {
	m := matrix{at: l.stack(tensors...), k: tensors[0].Shape[1]}
	for _, t := range tensors {
		m.n += t.Shape[0]
	}
	return m
}

// tensor sends one tensor, converted to the element type of the mode.
func (l *loader) tensor(t *model.Tensor, to address) {
	size := elementSize(l.bf16)
	for _, data := range cut(t.Data, pieceBytes/size*t.Type.Size()) {
		n, at := len(data)/t.Type.Size()*size, to
		l.pieces <- func(c *carrier) error {
			return c.send(at, n, func(buf []byte) { convert(buf, data, t.Type, c.bf16) })
		}
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

// loadWeights copies the stage's part of the model; narrow says that the matrices of layers get eight bits a weight.
func loadWeights(la *launcher, m *model.Model, st backend.Stage, bf16, narrow bool) (*weights, error) {
	pieces := make(chan func(*carrier) error, piecesAhead)
	wait, err := carry(la, bf16, pieces)
	if err != nil {
		return &weights{}, err
	}
	l := &loader{launcher: la, bf16: bf16, pieces: pieces}
	w, matrix, first, end := &weights{}, l.matrix, st.First, st.End
	w.turns = l.rotations(&m.Config) // first, since they are computed
	if narrow {
		matrix = l.narrow
	}
	if first == 0 {
		w.embed = l.stack(m.Embed)
	}
	for i := first; i < end; i++ {
		t := &m.Layers[i]
		w.layers = append(w.layers, layer{
			attnNorm: l.stack(t.AttnNorm), mlpNorm: l.stack(t.MLPNorm), qkv: matrix(t.Q, t.K, t.V), o: matrix(t.O),
			gateUp: matrix(t.Gate, t.Up), down: matrix(t.Down), qkvBias: l.stack(t.QBias, t.KBias, t.VBias),
			qNorm: l.stack(t.QNorm), kNorm: l.stack(t.KNorm), window: m.Config.Windows[i],
		})
	}
	if end == m.Config.Layers {
		w.norm = l.stack(m.Norm)
		if m.Head == m.Embed && first == 0 {
			w.head.at, w.head.n, w.head.k = w.embed, m.Config.Vocab, m.Config.Hidden
		} else {
			w.head = l.matrix(m.Head)
		}
	}
	close(pieces)
	w.all, w.bytes = l.all, l.bytes
	return w, errors.Join(l.err, wait())
}

// piecesAhead is how many pieces wait for a carrier: enough for the time that it takes to get memory for the next ones.
const piecesAhead = 256

// rotations computes the angles as the models were trained: position times frequency in float32.
func (l *loader) rotations(c *model.Config) address {
	freq := c.RoPE.InvFreq(c.HeadSize)
	row := 8 * len(freq) // bytes of a position
	at := l.room(c.ContextLen * row)
	for from, per := 0, pieceBytes/row; from < c.ContextLen && l.err == nil; from += per {
		to := min(from+per, c.ContextLen)
		l.pieces <- func(k *carrier) error {
			return k.send(at+address(from*row), (to-from)*row, func(buf []byte) { angles(words[float32](buf), freq, from, to, c.RoPE.Scale) })
		}
	}
	return at
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
