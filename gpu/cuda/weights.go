//go:build cuda

package cuda

import (
	"encoding/binary"
	"math"
	"unsafe"

	"meridian.internal/gpu/model"
)

// matrix is a weight on the card: (n outputs, k inputs).
type matrix struct {
	at   address
	n, k int
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

// loader copies weights to the card through one pinned buffer, in pieces.
type loader struct {
	*stream
	stage pinned
	bf16  bool
	all   []address
	bytes int
	err   error
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
	at, err := l.alloc(n * l.elementSize())
	if err != nil {
		l.err = err
		return 0
	}
	l.all, l.bytes = append(l.all, at), l.bytes+n*l.elementSize()
	to := at
	for _, t := range tensors {
		if t != nil && l.err == nil {
			l.err = l.tensor(t, to)
			to += address(t.Elements() * l.elementSize())
		}
	}
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
		buf := l.stage.bytes()[:n*l.elementSize()]
		l.convert(buf, data[:n*size], t.Type)
		if err := l.upload(to, l.stage.at, len(buf)); err != nil {
			return err
		}
		if err := l.wait(); err != nil {
			return err
		}
		data, to = data[n*size:], to+address(len(buf))
	}
	return nil
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

// loadWeights copies the stage's part of the model.
func loadWeights(s *stream, m *model.Model, first, end int, bf16 bool) (*weights, error) {
	l := &loader{stream: s, bf16: bf16}
	if err := s.growPinned(&l.stage, stageBytes); err != nil {
		return nil, err
	}
	w := &weights{}
	if first == 0 {
		w.embed = l.stack(m.Embed)
	}
	for i := first; i < end; i++ {
		t := &m.Layers[i]
		w.layers = append(w.layers, layer{
			attnNorm: l.stack(t.AttnNorm), mlpNorm: l.stack(t.MLPNorm), qkv: l.matrix(t.Q, t.K, t.V), o: l.matrix(t.O),
			gateUp: l.matrix(t.Gate, t.Up), down: l.matrix(t.Down), qkvBias: l.stack(t.QBias, t.KBias, t.VBias),
			qNorm: l.stack(t.QNorm), kNorm: l.stack(t.KNorm), window: m.Config.Windows[i],
		})
	}
	if end == m.Config.Layers {
		w.norm = l.stack(m.Norm)
		if m.Head == m.Embed && first == 0 {
			w.head = matrix{w.embed, m.Config.Vocab, m.Config.Hidden}
		} else {
			w.head = l.matrix(m.Head)
		}
	}
	w.turns = l.rotations(&m.Config)
	w.all, w.bytes = l.all, l.bytes
	return w, firstOf(l.err, s.freePinned(&l.stage))
}

// rotations computes the angles as the models were trained: position times frequency in float32.
func (l *loader) rotations(c *model.Config) address {
	freq := c.RoPE.InvFreq(c.HeadSize)
	at, err := l.alloc(c.ContextLen * len(freq) * 8)
	if err != nil || l.err != nil {
		l.err = firstOf(l.err, err)
		return at
	}
	l.all, l.bytes = append(l.all, at), l.bytes+c.ContextLen*len(freq)*8
	to, out, per := at, words[float32](l.stage.bytes()), stageBytes/(8*len(freq))
	for pos := 0; pos < c.ContextLen; {
		n := 0
		for end := min(pos+per, c.ContextLen); pos < end; pos++ {
			for _, f := range freq {
				sin, cos := math.Sincos(float64(float32(pos) * float32(f)))
				out[n], out[n+1] = float32(cos*c.RoPE.Scale), float32(sin*c.RoPE.Scale)
				n += 2
			}
		}
		if l.err = firstOf(l.upload(to, uintptr(unsafe.Pointer(&out[0])), 4*n), l.wait()); l.err != nil {
			break
		}
		to += address(4 * n)
	}
	return at
}
