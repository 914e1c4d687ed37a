package model

import (
	"encoding/binary"
	"math"
)

// Tensor is one weight, row-major as in the file. Data belongs to the Model and must not be written.
type Tensor struct {
	Name  string
	Type  DType
	Shape []int  // (rows, columns) of a matrix as (out, in), (n) of a vector
	Data  []byte // little endian, starts at a multiple of the element size
}

// Elements is the number of elements.
func (t *Tensor) Elements() int {
	n := 1
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

// Row converts row i, the elements of all dimensions but the first, into dst, exactly. A vector is one row of a matrix
// when i is 0 and dst is as long as the vector.
func (t *Tensor) Row(i int, dst []float32) {
	size := t.Type.Size()
	src := t.Data[i*len(dst)*size : (i+1)*len(dst)*size]
	for j := range dst {
		switch t.Type {
		case F32:
			dst[j] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*j:]))
		case F16:
			dst[j] = F16ToFloat32(binary.LittleEndian.Uint16(src[2*j:]))
		default:
			dst[j] = BF16ToFloat32(binary.LittleEndian.Uint16(src[2*j:]))
		}
	}
}

// Float32 converts the whole tensor into a new slice; for small tensors such as norms and biases. A nil tensor gives nil.
func (t *Tensor) Float32() []float32 {
	if t == nil {
		return nil
	}
	dst := make([]float32, t.Elements())
	t.Row(0, dst)
	return dst
}

// Layer holds the weights of one decoder layer. H is Config.Hidden, I Config.Intermediate, Q = Heads*HeadSize,
// KV = KVHeads*HeadSize. A tensor that the architecture does not have is nil.
type Layer struct {
	AttnNorm            *Tensor // (H)
	Q                   *Tensor // (Q, H)
	K, V                *Tensor // (KV, H)
	O                   *Tensor // (H, Q)
	QBias, KBias, VBias *Tensor // (Q), (KV), (KV); with Config.QKVBias
	QNorm, KNorm        *Tensor // (HeadSize); with Config.QKNorm
	MLPNorm             *Tensor // (H)
	Gate, Up            *Tensor // (I, H)
	Down                *Tensor // (H, I)
}

// slot is where a tensor of a checkpoint goes, and what it must be.
type slot struct {
	name  string
	shape []int
	to    **Tensor
}

// slots lists every tensor that a model of this config has, in the order in which a forward pass uses them.
func (m *Model) slots() []slot {
	c := &m.Config
	s := []slot{{"model.embed_tokens.weight", []int{c.Vocab, c.Hidden}, &m.Embed}}
	for i := range m.Layers {
		s = m.Layers[i].slots(s, c, layerName(i))
	}
	s = append(s, slot{"model.norm.weight", []int{c.Hidden}, &m.Norm})
	if !c.TiedHead {
		s = append(s, slot{"lm_head.weight", []int{c.Vocab, c.Hidden}, &m.Head})
	}
	return s
}

func (l *Layer) slots(s []slot, c *Config, at string) []slot {
	q, kv := c.Heads*c.HeadSize, c.KVHeads*c.HeadSize
	add := func(name string, to **Tensor, shape ...int) { s = append(s, slot{at + name, shape, to}) }
	add("input_layernorm.weight", &l.AttnNorm, c.Hidden)
	add("self_attn.q_proj.weight", &l.Q, q, c.Hidden)
	add("self_attn.k_proj.weight", &l.K, kv, c.Hidden)
	add("self_attn.v_proj.weight", &l.V, kv, c.Hidden)
	if c.QKVBias {
		add("self_attn.q_proj.bias", &l.QBias, q)
		add("self_attn.k_proj.bias", &l.KBias, kv)
		add("self_attn.v_proj.bias", &l.VBias, kv)
	}
	if c.QKNorm {
		add("self_attn.q_norm.weight", &l.QNorm, c.HeadSize)
		add("self_attn.k_norm.weight", &l.KNorm, c.HeadSize)
	}
	add("self_attn.o_proj.weight", &l.O, c.Hidden, q)
	add("post_attention_layernorm.weight", &l.MLPNorm, c.Hidden)
	add("mlp.gate_proj.weight", &l.Gate, c.Intermediate, c.Hidden)
	add("mlp.up_proj.weight", &l.Up, c.Intermediate, c.Hidden)
	add("mlp.down_proj.weight", &l.Down, c.Hidden, c.Intermediate)
	return s
}
