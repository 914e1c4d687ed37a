//go:build cuda

package account

import (
	"errors"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/cuda"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/model"
)

// cardConfig is a Llama of 980 million parameters: the layers of one of 1.24 billion.
const cardConfig = `{"architectures":["LlamaForCausalLM"],"vocab_size":2048,"hidden_size":2048,"intermediate_size":8192,"num_hidden_layers":16,
	"num_attention_heads":32,"num_key_value_heads":8,"head_dim":64,"max_position_embeddings":4096,"hidden_act":"silu","tie_word_embeddings":true}`

// BenchmarkOnOffOnTheCard is the ratio of the times of a decode step on the card with all accounting and without it, batch 64.
// Turns alternate.
func BenchmarkOnOffOnTheCard(b *testing.B) {
	dir := b.TempDir()
	check(b, model.WriteRandom(dir, []byte(cardConfig), 1))
	m, err := model.Load(dir)
	check(b, err)
	defer func() { check(b, m.Close()) }()
	open := func(now func() int64) (backend.Backend, error) {
		d, err := cuda.New(m, cuda.Options{KVBlocks: 2048, MaxSlots: 64, Now: now})
		if errors.Is(err, cuda.ErrUnavailable) {
			b.Skip(err)
		}
		return d, err
	}
	more, _, ratio := onOff(b, engine.Config{Overlap: true, MaxBatchSize: 64}, open, 64, 400)
	report(b, "µs/step-more", more)
	report(b, "%-longer", percentLonger(ratio))
	b.ReportMetric(median(ratio), "on/off")
}

func percentLonger(ratio []float64) []float64 {
	out := make([]float64, len(ratio))
	for i, r := range ratio {
		out[i] = 100 * (r - 1)
	}
	return out
}
