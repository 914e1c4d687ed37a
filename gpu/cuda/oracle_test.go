//go:build cuda

package cuda

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
	"meridian.internal/shared/infer"
)

// oracleJob is one line of the input of peer/logits.py.
type oracleJob struct {
	Dir    string  `json:"dir"`
	Tokens []int32 `json:"tokens"`
}

// TestModelsAgreeWithTransformers compares log probabilities of small random models of all architectures with PyTorch's.
// MERIDIAN_TRANSFORMERS names a python that has torch and transformers.
func TestModelsAgreeWithTransformers(t *testing.T) {
	python := os.Getenv("MERIDIAN_TRANSFORMERS")
	if python == "" {
		t.Skip("MERIDIAN_TRANSFORMERS names no python with torch and transformers")
	}
	cases := []struct {
		arch, kind string
		extra      extra
	}{
		{"LlamaForCausalLM", "llama", extra{"head_dim": 64}},
		{"LlamaForCausalLM", "llama", extra{"head_dim": 128, "num_key_value_heads": 1, "rope_theta": 500000.0, "rope_scaling": map[string]any{
			"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
		}}},
		{"MistralForCausalLM", "mistral", extra{"head_dim": 64, "sliding_window": 33}},
		{"Qwen2ForCausalLM", "qwen2", extra{"hidden_size": 128, "tie_word_embeddings": true}},
		{"Qwen3ForCausalLM", "qwen3", extra{"head_dim": 64, "num_key_value_heads": 4}},
	}
	var jobs bytes.Buffer
	var models []*model.Model
	tokens := make([]int32, 200)
	for i := range tokens {
		tokens[i] = int32((i*i*11 + i*17 + 3) % 200)
	}
	for _, c := range cases {
		c.extra["model_type"], c.extra["attention_bias"] = c.kind, false
		dir := writeRandom(t, c.arch, c.extra)
		models = append(models, loadModel(t, dir))
		line, err := json.Marshal(oracleJob{dir, tokens})
		if err != nil {
			t.Fatal(err)
		}
		jobs.Write(append(line, '\n'))
	}
	cmd := exec.CommandContext(t.Context(), python, "peer/logits.py")
	cmd.Stdin, cmd.Stderr = &jobs, os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("peer/logits.py: %v", err)
	}
	answers := json.NewDecoder(bytes.NewReader(out))
	for i, c := range cases {
		var answer [][][2]float64
		if err := answers.Decode(&answer); err != nil {
			t.Fatalf("answer %d of peer/logits.py: %v", i, err)
		}
		for _, mode := range []struct {
			deterministic bool
			limit         float64
		}{{true, 1e-3}, {false, 0.1}} {
			b := open(t, models[i], Options{TokensPerBlock: 16, KVBlocks: 32, Deterministic: mode.deterministic})
			worst := farthest(oracleLogprobs(answer), allLogprobs(t, b, tokens, 70))
			shut(t, b)
			t.Logf("%s %v, deterministic %v: log probabilities differ by up to %.2g", c.kind, c.extra, mode.deterministic, worst)
			if !(worst < mode.limit) {
				t.Errorf("%s, deterministic %v: %g away from transformers", c.kind, mode.deterministic, worst)
			}
		}
	}
}

func oracleLogprobs(answer [][][2]float64) []backend.Logprobs {
	out := make([]backend.Logprobs, len(answer))
	for i, position := range answer {
		for _, p := range position {
			out[i].Top = append(out[i].Top, infer.Logprob{Token: int32(p[0]), Logprob: float32(p[1])})
		}
	}
	return out
}
