package model

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// config builds a small config.json; extra keys replace or add to the base.
func config(arch string, extra string) []byte {
	base := `"architectures":["` + arch + `"],"vocab_size":96,"hidden_size":32,"intermediate_size":48,"num_hidden_layers":2,
		"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"max_position_embeddings":128,"hidden_act":"silu"`
	if extra != "" {
		base += "," + extra
	}
	return []byte("{" + base + "}")
}

func TestEmbeddedModelLoads(t *testing.T) {
	m, err := Load("")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	c := m.Config
	if c.Vocab != 2048 || c.Hidden != 256 || c.Layers != 4 || c.HeadSize != 64 || c.KVHeads != 2 || !c.TiedHead {
		t.Errorf("config %+v", c)
	}
	if len(c.EOS) != 2 || c.EOS[0] != 1 || c.EOS[1] != 4 || c.BOS == nil || *c.BOS != 0 {
		t.Errorf("eos %v bos %v", c.EOS, c.BOS)
	}
	if m.Head != m.Embed || m.Layers[3].Down == nil || m.Layers[0].QBias != nil || m.Layers[0].QNorm != nil {
		t.Error("tensors are not bound as a tied Llama needs them")
	}
	if len(m.Hash) != 16 || len(m.TokenizerJSON) == 0 || len(m.TokenizerConfigJSON) == 0 {
		t.Errorf("hash %q, tokenizer %d bytes", m.Hash, len(m.TokenizerJSON))
	}
}

func TestHashDependsOnContentAlone(t *testing.T) {
	write := func(seed uint64) string {
		dir := t.TempDir()
		if err := WriteRandom(dir, config("Qwen2ForCausalLM", ""), seed); err != nil {
			t.Fatal(err)
		}
		return dir
	}
	hash := func(dir string) string {
		m, err := Load(dir)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = m.Close() }()
		return m.Hash
	}
	a, b, other := write(1), write(1), write(2)
	if hash(a) != hash(b) {
		t.Error("two folders of equal content have different hashes")
	}
	if hash(a) == hash(other) {
		t.Error("other weights, same hash")
	}
	if err := os.WriteFile(filepath.Join(b, "generation_config.json"), []byte(`{"eos_token_id":[7,8]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if hash(a) == hash(b) {
		t.Error("other EOS ids, same hash")
	}
}

func TestArchitecturesGetTheirTensors(t *testing.T) {
	for _, tc := range []struct {
		name, arch, extra string
		check             func(m *Model) bool
	}{
		{"llama without kv heads has as many as heads", "LlamaForCausalLM", `"num_key_value_heads":null`,
			func(m *Model) bool { return m.Config.KVHeads == 4 && m.Layers[1].K.Shape[0] == 32 }},
		{"an untied head is a tensor of its own", "LlamaForCausalLM", "", func(m *Model) bool { return m.Head != m.Embed }},
		{"a tied head is the embedding", "MistralForCausalLM", `"tie_word_embeddings":true`, func(m *Model) bool { return m.Head == m.Embed }},
		{"qwen2 has biases on q, k and v", "Qwen2ForCausalLM", "", func(m *Model) bool { return m.Layers[0].QBias != nil && m.Layers[1].VBias != nil }},
		{"qwen3 has norms on q and k", "Qwen3ForCausalLM", "", func(m *Model) bool { return m.Layers[0].QNorm.Shape[0] == 8 && m.Layers[0].QBias == nil }},
		{"torch_dtype gives the type of random weights", "LlamaForCausalLM", `"torch_dtype":"float16"`, func(m *Model) bool { return m.Embed.Type == F16 }},
		{"dtype gives it too", "LlamaForCausalLM", `"dtype":"float32"`, func(m *Model) bool { return m.Embed.Type == F32 }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := WriteRandom(dir, config(tc.arch, tc.extra), 1); err != nil {
				t.Fatal(err)
			}
			m, err := Load(dir)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = m.Close() }()
			if !tc.check(m) {
				t.Errorf("%+v", m.Config)
			}
		})
	}
}

// TestHeaderIsCheckedAgainstConfig changes one word of the header to another of the same length.
func TestHeaderIsCheckedAgainstConfig(t *testing.T) {
	for _, tc := range []struct{ name, old, new, want string }{
		{"a tensor with another name is missing", "model.norm.weight", "model.nerm.weight", `"model.norm.weight" is missing`},
		{"a transposed shape is refused", `"shape":[16,32]`, `"shape":[32,16]`, "has shape [32 16]; config.json asks for [16 32]"},
		{"integers are refused", `"dtype":"BF16","shape":[32],`, `"dtype":"I16", "shape":[32],`, "has dtype I16; must be BF16, F16 or F32"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			if err := WriteRandom(dir, config("LlamaForCausalLM", ""), 1); err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(dir, "model.safetensors")
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			changed := strings.Replace(string(data), tc.old, tc.new, 1)
			if changed == string(data) {
				t.Fatalf("%q is not in the header", tc.old)
			}
			if err := os.WriteFile(path, []byte(changed), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err = Load(dir)
			if !errors.Is(err, ErrTensor) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestUnknownTensorIsRefused(t *testing.T) {
	dir := t.TempDir()
	if err := WriteRandom(dir, config("Qwen2ForCausalLM", ""), 1); err != nil {
		t.Fatal(err)
	}
	llama := config("LlamaForCausalLM", "")
	if err := os.WriteFile(filepath.Join(dir, "config.json"), llama, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(dir); !errors.Is(err, ErrTensor) || !strings.Contains(err.Error(), ".bias") {
		t.Errorf("a Llama with Qwen2's biases gave %v", err)
	}
}

func TestShardsNeedAnIndex(t *testing.T) {
	dir := t.TempDir()
	if err := WriteRandom(dir, config("LlamaForCausalLM", ""), 1); err != nil {
		t.Fatal(err)
	}
	whole, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = whole.Close() }()
	split := splitInTwo(t, dir)
	for _, tc := range []struct {
		name   string
		change func(weightMap map[string]string)
		want   string // "" when it must load
	}{
		{"two shards and their index load", func(map[string]string) {}, ""},
		{"a file outside the folder is refused", func(w map[string]string) { w["model.norm.weight"] = "../x.safetensors" }, "must be a plain name"},
		{"a tensor that is in another shard is refused", func(w map[string]string) { w["model.norm.weight"] = "a.safetensors" }, `"model.norm.weight" is here`},
		{"a tensor that is nowhere is refused", func(w map[string]string) { w["ghost"] = "a.safetensors" }, `"ghost" is not in`},
		{"a shard that does not exist is named", func(w map[string]string) { w["ghost"] = "c.safetensors" }, "c.safetensors"},
		{"an empty map is refused", func(w map[string]string) { clear(w) }, "weight_map is empty"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			split.writeIndex(t, tc.change)
			m, err := Load(split.dir)
			if tc.want != "" {
				if err == nil || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("got %v, want %q", err, tc.want)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = m.Close() }()
			if m.Hash != whole.Hash {
				t.Error("shards change the hash")
			}
		})
	}
	if err := os.Remove(filepath.Join(split.dir, indexName)); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(split.dir); !errors.Is(err, ErrTensor) {
		t.Errorf("two files without an index gave %v", err)
	}
}

func TestMissingFilesAreNamed(t *testing.T) {
	for _, name := range []string{"config.json", "tokenizer.json", "model.safetensors"} {
		dir := t.TempDir()
		if err := WriteRandom(dir, config("LlamaForCausalLM", ""), 1); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: %v", name, err)
		}
	}
}

func TestMisalignedDataIsCopied(t *testing.T) {
	raw := make([]byte, 64)
	for i := range raw {
		raw[i] = byte(i)
	}
	for at := range 8 {
		got := aligned(raw[at:at+12], 4)
		if len(got) != 12 || got[0] != byte(at) || got[11] != byte(at+11) {
			t.Errorf("at %d: %v", at, got)
		}
	}
}
