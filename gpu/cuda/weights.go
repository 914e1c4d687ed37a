//go:build cuda

package cuda

import (
	"encoding/binary"
	"errors"
	"math"
	"runtime"

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

// loader copies weights to the card through two pinned buffers in turn, in pieces: one is filled while the other is on its way.
type loader struct {
	*launcher
	stages [2]stage
	turn   int
	wide   buffer // rows that are to become narrow
	bf16   bool
	all    []address
	bytes  int
	err    error
}

// stage is a pinned buffer; free comes to pass when the card has its last piece.
type stage struct {
	pinned
	free event
}

// open makes the stages.
func (l *loader) open() error {
	for i := range l.stages {
		s := &l.stages[i]
		err := l.growPinned(&s.pinned, stageBytes)
		if err == nil {
			s.free, err = l.newEvent()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// close waits for the pieces that are on their way, and frees what they went through.
func (l *loader) close() error {
	err := firstOf(l.wait(), l.free(l.wide.at))
	for i := range l.stages {
		err = firstOf(err, l.freeStage(&l.stages[i]))
	}
	return err
}

// freeStage frees what a stage holds; nothing is on its way through it.
func (c *context) freeStage(s *stage) error {
	err := c.freePinned(&s.pinned)
	if s.free != 0 {
		err = firstOf(err, c.do("cuEventDestroy_v2", uintptr(s.free)))
	}
	return err
}

// next gives the stage whose turn it is, once its last piece is on the card.
func (l *loader) next() (*stage, error) {
	s := &l.stages[l.turn]
	l.turn = 1 - l.turn
	return s, l.waitEvent(s.free) // at once, if it was never sent
}

// stageBytes is a multiple of every element size.
const stageBytes = 32 << 20

func (l *loader) elementSize() int {
	if l.bf16 {
		return 2
	}
	return 4
}

// stack puts tensors one behind the other; nil ones are left out. 0: there are none.
func (l *loader) stack(tensors ...*model.Tensor) address {
	n := 0
	for _, t := range tensors {
		if t != nil {
			n += t.Elements()
		}
	}
	if n == 0 || l.err != nil {
		return 0
	}
	at := l.room(n * l.elementSize())
	to := at
	for _, t := range tensors {
		if t != nil && l.err == nil {
			l.err = l.tensor(t, to)
			to += address(t.Elements() * l.elementSize())
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

// tensor copies one tensor, converted to the element type of the mode.
func (l *loader) tensor(t *model.Tensor, to address) error {
	size, data := t.Type.Size(), t.Data
	for len(data) > 0 {
		n := min(len(data)/size, stageBytes/4)
		s, err := l.next()
		if err != nil {
			return err
		}
		buf := s.bytes()[:n*l.elementSize()]
		l.fill(buf, data[:n*size], t.Type)
		if err := l.upload(to, s.at, len(buf)); err != nil {
			return err
		}
		if err := l.record(s.free); err != nil {
			return err
		}
		data, to = data[n*size:], to+address(len(buf))
	}
	return nil
}

// leastFilled is how many bytes are worth a goroutine.
const leastFilled = 1 << 20

// fill converts with all processors: one alone is slower than the link to the card.
func (l *loader) fill(dst, src []byte, t model.DType) {
	inParts(len(src)/t.Size(), min(runtime.GOMAXPROCS(0), 1+len(src)/leastFilled), func(from, to int) {
		l.convert(dst[from*l.elementSize():to*l.elementSize()], src[from*t.Size():to*t.Size()], t)
	})
}

func (l *loader) convert(dst, src []byte, t model.DType) {
	if l.bf16 && t == model.BF16 || !l.bf16 && t == model.F32 {
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
		if l.bf16 {
			binary.LittleEndian.PutUint16(dst[2*i:], model.Float32ToBF16(v))
		} else {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
		}
	}
}

// loadWeights copies the stage's part of the model; narrow says that the matrices of layers get eight bits a weight.
func loadWeights(la *launcher, m *model.Model, st backend.Stage, bf16, narrow bool) (*weights, error) {
	l := &loader{launcher: la, bf16: bf16}
	if err := l.open(); err != nil {
		return &weights{}, errors.Join(err, l.close())
	}
	w, matrix, first, end := &weights{}, l.matrix, st.First, st.End
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
	w.turns = l.rotations(&m.Config)
	w.all, w.bytes = l.all, l.bytes
	return w, firstOf(l.err, l.close())
}

// rotations computes the angles as the models were trained: position times frequency in float32.
func (l *loader) rotations(c *model.Config) address {
	freq := c.RoPE.InvFreq(c.HeadSize)
	at := l.room(c.ContextLen * len(freq) * 8)
	if l.err != nil {
		return 0
	}
	to, per := at, stageBytes/(8*len(freq))
	for pos := 0; pos < c.ContextLen; {
		var s *stage
		if s, l.err = l.next(); l.err != nil {
			break
		}
		n, out := 0, words[float32](s.bytes())
		for end := min(pos+per, c.ContextLen); pos < end; pos++ {
			for _, f := range freq {
				sin, cos := math.Sincos(float64(float32(pos) * float32(f)))
				out[n], out[n+1] = float32(cos*c.RoPE.Scale), float32(sin*c.RoPE.Scale)
				n += 2
			}
		}
		if l.err = firstOf(l.upload(to, s.at, 4*n), l.record(s.free)); l.err != nil {
			break
		}
		to += address(4 * n)
	}
	return at
}
