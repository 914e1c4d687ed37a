package model

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"testing"
)

func TestParseConfigRefuses(t *testing.T) {
	for _, tc := range []struct{ name, arch, extra, want string }{
		{"an unknown architecture", "GemmaForCausalLM", "", `architectures: ["GemmaForCausalLM"]; must be one of LlamaForCausalLM`},
		{"another activation", "LlamaForCausalLM", `"hidden_act":"gelu"`, `hidden_act: "gelu"`},
		{"quantized weights", "LlamaForCausalLM", `"quantization_config":{"quant_method":"fp8"}`, "quantization_config"},
		{"attention bias on Llama", "LlamaForCausalLM", `"attention_bias":true`, "attention_bias: true"},
		{"attention bias on Qwen3", "Qwen3ForCausalLM", `"attention_bias":true`, "attention_bias: true"},
		{"MLP bias", "LlamaForCausalLM", `"mlp_bias":true`, "mlp_bias: true"},
		{"partial rotation", "LlamaForCausalLM", `"partial_rotary_factor":0.5`, "partial_rotary_factor: 0.5"},
		{"no hidden size", "LlamaForCausalLM", `"hidden_size":null`, "hidden_size: missing"},
		{"a negative size", "LlamaForCausalLM", `"vocab_size":-1`, "vocab_size: -1; must be 1 to"},
		{"a huge size", "LlamaForCausalLM", `"num_hidden_layers":1000000000`, "num_hidden_layers: 1000000000"},
		{"a size that is text", "LlamaForCausalLM", `"vocab_size":"96"`, "vocab_size"},
		{"KV heads that do not divide the heads", "LlamaForCausalLM", `"num_key_value_heads":3`, "num_key_value_heads: 3; must divide"},
		{"no KV heads for Qwen2", "Qwen2ForCausalLM", `"num_key_value_heads":null`, "num_key_value_heads: missing"},
		{"an odd head size", "LlamaForCausalLM", `"head_dim":7`, "head_dim: 7; must be even"},
		{"an epsilon of 0", "LlamaForCausalLM", `"rms_norm_eps":0`, "rms_norm_eps: 0"},
		{"an EOS id beyond the vocabulary", "LlamaForCausalLM", `"eos_token_id":[1,96]`, "eos_token_id: 96"},
		{"a negative BOS id", "LlamaForCausalLM", `"bos_token_id":-4`, "bos_token_id: -4"},
		{"a window of 0", "MistralForCausalLM", `"sliding_window":0`, "sliding_window: 0"},
		{"a window that is text", "MistralForCausalLM", `"sliding_window":"x"`, `sliding_window: "x"`},
		{"sliding layers without a window", "Qwen3ForCausalLM", `"layer_types":["full_attention","sliding_attention"]`, "layer_types[1]"},
		{"a pattern of no layers", "MistralForCausalLM", `"sliding_window_pattern":0`, "sliding_window_pattern: 0"},
		{"unknown layer types", "Qwen3ForCausalLM", `"use_sliding_window":true,"layer_types":["full_attention","linear"]`, `layer_types[1]: "linear"`},
		{"too few layer types", "Qwen3ForCausalLM", `"use_sliding_window":true,"layer_types":["full_attention"]`, "layer_types: 1 entries"},
		{"an unknown rope type", "LlamaForCausalLM", `"rope_scaling":{"rope_type":"longrope"}`, `rope_scaling.rope_type: "longrope"`},
		{"rope of a type that is text, new form", "LlamaForCausalLM", `"rope_parameters":{"rope_type":"dynamic"}`, `rope_parameters.rope_type: "dynamic"`},
		{"linear without factor", "LlamaForCausalLM", `"rope_scaling":{"type":"linear"}`, "rope_scaling.factor: missing"},
		{"llama3 without original length", "LlamaForCausalLM", `"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4}`, "original_max_position_embeddings: missing"},
		{"llama3 with equal factors", "LlamaForCausalLM", `"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":4,"high_freq_factor":4}`, "high_freq_factor: 4"},
		{"yarn with betas the wrong way round", "LlamaForCausalLM", `"rope_scaling":{"rope_type":"yarn","factor":8,"beta_fast":1,"beta_slow":4}`, "beta_fast: 1"},
		{"a negative factor", "LlamaForCausalLM", `"rope_scaling":{"rope_type":"linear","factor":-8}`, "factor: -8"},
		{"theta of 0", "LlamaForCausalLM", `"rope_theta":0`, "rope_theta: 0"},
		{"rope by layer type", "LlamaForCausalLM", `"rope_parameters":{"full_attention":{"rope_theta":1e4}}`, "full_attention"},
		{"rope that is text", "LlamaForCausalLM", `"rope_scaling":"yes"`, "rope_scaling"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := ParseConfig(config(tc.arch, tc.extra))
			if !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestParseConfigWindows(t *testing.T) {
	for _, tc := range []struct {
		name, arch, extra string
		want              []int
	}{
		{"Llama has none", "LlamaForCausalLM", `"sliding_window":64`, []int{0, 0}},
		{"Mistral slides in all layers", "MistralForCausalLM", `"sliding_window":64`, []int{64, 64}},
		{"null turns it off", "MistralForCausalLM", `"sliding_window":null`, []int{0, 0}},
		{"a missing key is transformers' default", "MistralForCausalLM", "", []int{4096, 4096}},
		{"Qwen2 has none unless it says so", "Qwen2ForCausalLM", `"sliding_window":64,"max_window_layers":0`, []int{0, 0}},
		{"Qwen2 slides from max_window_layers on", "Qwen2ForCausalLM", `"use_sliding_window":true,"sliding_window":64,"max_window_layers":1`, []int{0, 64}},
		{"layer types of a Mistral", "MistralForCausalLM", `"sliding_window":8,"layer_types":["sliding_attention","full_attention"]`, []int{8, 0}},
		{"a pattern: each second layer sees everything", "MistralForCausalLM", `"sliding_window":8,"sliding_window_pattern":2`, []int{8, 0}},
		{"layer types decide", "Qwen3ForCausalLM", `"use_sliding_window":true,"sliding_window":8,"layer_types":["sliding_attention","full_attention"]`, []int{8, 0}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := ParseConfig(config(tc.arch, tc.extra))
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(c.Windows, tc.want) {
				t.Errorf("got %v, want %v", c.Windows, tc.want)
			}
		})
	}
}

func TestParseConfigTokens(t *testing.T) {
	for _, tc := range []struct {
		name, extra string
		want        string
	}{
		{"none", "", "[]"},
		{"null", `"eos_token_id":null`, "[]"},
		{"one", `"eos_token_id":3`, "[3]"},
		{"several", `"eos_token_id":[3,5]`, "[3 5]"},
	} {
		c, err := ParseConfig(config("LlamaForCausalLM", tc.extra))
		if err != nil || fmt.Sprint(c.EOS) != tc.want {
			t.Errorf("%s: got %v, %v", tc.name, c, err)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add(config("LlamaForCausalLM", ""))
	f.Add(config("Qwen3ForCausalLM", `"rope_parameters":{"rope_type":"yarn","factor":4},"use_sliding_window":true,"max_window_layers":1`))
	if data, err := os.ReadFile("meridian-tiny/config.json"); err == nil {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := ParseConfig(data)
		if err != nil {
			if !errors.Is(err, ErrConfig) {
				t.Errorf("undocumented error %v", err)
			}
			return
		}
		if c.Heads%c.KVHeads != 0 || c.HeadSize%2 != 0 || len(c.Windows) != c.Layers || len(c.RoPE.InvFreq(c.HeadSize)) != c.HeadSize/2 {
			t.Errorf("%+v passed", c)
		}
	})
}
