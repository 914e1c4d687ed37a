//go:build cuda

package cuda

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

// TestWeightsLieOnTheCardAsInTheModel compares what the carriers have brought, each its pieces, with what one conversion of the whole gives.
func TestWeightsLieOnTheCardAsInTheModel(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(max(4, runtime.GOMAXPROCS(0))))
	m := noiseModel(t, `{"architectures": ["LlamaForCausalLM"], "vocab_size": 5000, "hidden_size": 320, "intermediate_size": 2000,
"num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 64, "max_position_embeddings": 9000, "tie_word_embeddings": false}`)
	types := []model.DType{model.F32, model.F16, model.BF16}
	r := rand.New(rand.NewPCG(9, 9))
	for i, tensor := range tensorsOf(m) {
		tensor.Type = types[i%len(types)]
		tensor.Data = make([]byte, tensor.Elements()*tensor.Type.Size())
		for i := range tensor.Data {
			tensor.Data[i] = byte(r.Uint32()) & 0xbf // no infinities and other numbers that are none
		}
	}
	withStream(t, func(s *stream, p *pins) {
		for _, bf16 := range []bool{false, true} {
			w, err := loadWeights(newLauncher(s, nil), p, m, backend.Stage{End: 2}, loader{bf16: bf16})
			if err != nil {
				t.Fatal(err)
			}
			check := func(name string, at address, want []byte) {
				t.Helper()
				var there pinned
				got := make([]byte, len(want))
				if err := s.growPinned(&there, len(want)); err != nil {
					t.Fatal(err)
				}
				if err := firstOf(s.download(there.at, at, len(want)), s.wait()); err != nil {
					t.Fatal(err)
				}
				copy(got, there.bytes())
				if err := s.freePinned(&there); err != nil || !bytes.Equal(got, want) {
					t.Errorf("bf16 %t: %s lies on the card otherwise: %v", bf16, name, err)
				}
			}
			whole := func(tensors ...*model.Tensor) (out []byte) {
				for _, tensor := range tensors {
					part := make([]byte, tensor.Elements()*elementSize(bf16))
					convert(part, tensor.Data, tensor.Type, bf16)
					out = append(out, part...)
				}
				return out
			}
			check("the embedding", w.embed, whole(m.Embed))
			check("the head", w.head.at, whole(m.Head))
			for i, l := range m.Layers {
				check("QKV", w.layers[i].qkv.at, whole(l.Q, l.K, l.V))
				check("gate and up", w.layers[i].gateUp.at, whole(l.Gate, l.Up))
				check("down", w.layers[i].down.at, whole(l.Down))
				check("the norm", w.layers[i].mlpNorm, whole(l.MLPNorm))
			}
			turns := make([]float32, 9000*64)
			angles(turns, m.Config.RoPE.InvFreq(64), 0, 9000, m.Config.RoPE.Scale)
			check("the angles", w.turns, view(turns))
			if err := s.free(w.at); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// withStream runs f with a stream of card 0 and pinned memory.
func withStream(tb testing.TB, f func(*stream, *pins)) {
	tb.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c, err := openContext(0)
	if errors.Is(err, ErrUnavailable) {
		tb.Skip(err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	s, err := c.newStream()
	if err != nil {
		tb.Fatal(err)
	}
	var p pins
	p.open(c)
	f(s, &p)
	if err := firstOf(p.close(c), s.do("cuStreamDestroy_v2", s.handle), c.close()); err != nil {
		tb.Fatal(err)
	}
}

// tensorsOf are all tensors of a model.
func tensorsOf(m *model.Model) []*model.Tensor {
	out := []*model.Tensor{m.Embed, m.Norm}
	if m.Head != m.Embed {
		out = append(out, m.Head)
	}
	for i := range m.Layers {
		l := &m.Layers[i]
		out = append(out, l.AttnNorm, l.MLPNorm, l.Q, l.K, l.V, l.O, l.Gate, l.Up, l.Down)
	}
	return out
}

// BenchmarkLoad loads the weights of the 1.24 B shape out of a file in the page cache that is newly mapped each time.
func BenchmarkLoad(b *testing.B) {
	m := noiseModel(b, bench1B)
	path := filepath.Join(b.TempDir(), "weights")
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	size := 0
	for _, t := range tensorsOf(m) {
		if _, err := f.Write(t.Data); err != nil {
			b.Skip("no room for a file of weights: " + err.Error())
		}
		size += len(t.Data)
	}
	withStream(b, func(s *stream, p *pins) {
		var times []float64
		for b.Loop() {
			mapped, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ, syscall.MAP_SHARED)
			if err != nil {
				b.Fatal(err)
			}
			at := 0
			for _, t := range tensorsOf(m) {
				t.Data = mapped[at : at+len(t.Data)]
				at += len(t.Data)
			}
			from := now()
			w, err := loadWeights(newLauncher(s, nil), p, m, backend.Stage{End: m.Config.Layers}, loader{bf16: true})
			if err != nil {
				b.Fatal(err)
			}
			times = append(times, float64(now()-from)/1e6)
			if err := errors.Join(s.free(w.at), syscall.Munmap(mapped)); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(int64(w.bytes))
		}
		b.ReportMetric(median(times), "load-ms")
	})
}
