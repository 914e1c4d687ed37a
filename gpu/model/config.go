package model

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
)

// ErrConfig is wrapped by every error that says that a config.json cannot be run.
var ErrConfig = errors.New("model: unsupported config.json")

// Config is what a back end must know about a model.
type Config struct {
	Architecture string // class name of transformers, such as "LlamaForCausalLM"
	Vocab        int    // tokens
	Hidden       int
	Intermediate int // width of the MLP
	Layers       int
	Heads        int // query heads; a multiple of KVHeads
	KVHeads      int
	HeadSize     int // even
	ContextLen   int // tokens, prompt and output together
	NormEps      float64
	TiedHead     bool  // the output head is the embedding
	QKVBias      bool  // Q, K and V have a bias
	QKNorm       bool  // RMS norm over each head of Q and K, before RoPE
	Windows      []int // (layers) tokens that a query sees, itself included; 0: all
	RoPE         RoPE
	BOS          *int32  // nil: none
	EOS          []int32 // any of them ends a text; may be empty
	dtype        string  // of the checkpoint that WriteRandom makes
}

// architecture is what the class name alone says.
type architecture struct {
	name           string
	qkvBias        bool
	qkNorm         bool
	headSize       int  // when the config gives none; 0: Hidden/Heads
	kvHeads        bool // KVHeads may be missing: as many as Heads
	windowAlways   bool // sliding_window holds for all layers
	windowOptional bool // sliding_window holds if use_sliding_window, from layer max_window_layers on
	window         int  // when sliding_window is missing; 0: none
}

// architectures is the list of what can be run, with the defaults of transformers for keys that a file may leave out.
var architectures = []architecture{
	{name: "LlamaForCausalLM", kvHeads: true},
	{name: "MistralForCausalLM", windowAlways: true, window: 4096},
	{name: "Qwen2ForCausalLM", qkvBias: true, windowOptional: true, window: 4096},
	{name: "Qwen3ForCausalLM", qkNorm: true, headSize: 128, windowOptional: true, window: 4096},
}

func unsupported(field string, value any, want string) error {
	return fmt.Errorf("%w: %s: %v; %s", ErrConfig, field, value, want)
}

// rawConfig is config.json. A pointer is nil when the key is missing or null.
type rawConfig struct {
	Architectures       []string         `json:"architectures"`
	VocabSize           *int             `json:"vocab_size"`
	HiddenSize          *int             `json:"hidden_size"`
	IntermediateSize    *int             `json:"intermediate_size"`
	Layers              *int             `json:"num_hidden_layers"`
	Heads               *int             `json:"num_attention_heads"`
	KVHeads             *int             `json:"num_key_value_heads"`
	HeadDim             *int             `json:"head_dim"`
	MaxPositions        *int             `json:"max_position_embeddings"`
	NormEps             *float64         `json:"rms_norm_eps"`
	HiddenAct           *string          `json:"hidden_act"`
	AttentionBias       bool             `json:"attention_bias"`
	MLPBias             bool             `json:"mlp_bias"`
	TieWordEmbeddings   bool             `json:"tie_word_embeddings"`
	Quantization        *json.RawMessage `json:"quantization_config"`
	SlidingWindow       json.RawMessage  `json:"sliding_window"` // missing and null differ
	UseSlidingWindow    bool             `json:"use_sliding_window"`
	MaxWindowLayers     *int             `json:"max_window_layers"`
	LayerTypes          []string         `json:"layer_types"`
	WindowPattern       *int             `json:"sliding_window_pattern"`
	PartialRotaryFactor *float64         `json:"partial_rotary_factor"`
	RopeTheta           *float64         `json:"rope_theta"`
	RopeScaling         *json.RawMessage `json:"rope_scaling"`
	RopeParameters      *json.RawMessage `json:"rope_parameters"`
	BOS                 tokenIDs         `json:"bos_token_id"`
	EOS                 tokenIDs         `json:"eos_token_id"`
	DType               string           `json:"dtype"`
	TorchDType          string           `json:"torch_dtype"`
}

// tokenIDs reads null, one id or a list of ids.
type tokenIDs []int32

// UnmarshalJSON implements json.Unmarshaler.
func (t *tokenIDs) UnmarshalJSON(b []byte) error {
	*t = nil
	if bytes.Equal(b, []byte("null")) {
		return nil
	}
	if len(b) > 0 && b[0] == '[' {
		return json.Unmarshal(b, (*[]int32)(t))
	}
	var id int32
	if err := json.Unmarshal(b, &id); err != nil {
		return err
	}
	*t = tokenIDs{id}
	return nil
}

// ParseConfig reads a config.json and refuses what the back ends cannot run, naming the field and its value.
func ParseConfig(data []byte) (*Config, error) {
	var r rawConfig
	if err := json.Unmarshal(data, &r); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	arch, err := r.architecture()
	if err != nil {
		return nil, err
	}
	if err := r.refuse(arch); err != nil {
		return nil, err
	}
	c := &Config{
		Architecture: arch.name, TiedHead: r.TieWordEmbeddings, QKVBias: arch.qkvBias, QKNorm: arch.qkNorm,
		NormEps: 1e-6, EOS: r.EOS, dtype: r.DType,
	}
	if c.dtype == "" {
		c.dtype = r.TorchDType
	}
	if r.NormEps != nil {
		c.NormEps = *r.NormEps
	}
	if !(c.NormEps > 0 && c.NormEps < 1) {
		return nil, unsupported("rms_norm_eps", c.NormEps, "must be above 0 and below 1")
	}
	if len(r.BOS) > 0 {
		c.BOS = &r.BOS[0]
	}
	if err := r.sizes(c, arch); err != nil {
		return nil, err
	}
	if err := checkTokens(c); err != nil {
		return nil, err
	}
	if c.Windows, err = r.windows(c, arch); err != nil {
		return nil, err
	}
	c.RoPE, err = r.rope(c)
	return c, err
}

func (r *rawConfig) architecture() (architecture, error) {
	var known []string
	for _, a := range architectures {
		if len(r.Architectures) == 1 && r.Architectures[0] == a.name {
			return a, nil
		}
		known = append(known, a.name)
	}
	return architecture{}, unsupported("architectures", fmt.Sprintf("%q", r.Architectures), "must be one of "+strings.Join(known, ", "))
}

func (r *rawConfig) refuse(arch architecture) error {
	switch {
	case r.HiddenAct != nil && *r.HiddenAct != "silu":
		return unsupported("hidden_act", fmt.Sprintf("%q", *r.HiddenAct), `only "silu" is supported`)
	case r.Quantization != nil:
		return unsupported("quantization_config", string(*r.Quantization), "only bf16, f16 and f32 weights are supported")
	case r.AttentionBias && !arch.qkvBias:
		return unsupported("attention_bias", true, "only false is supported for "+arch.name)
	case r.MLPBias:
		return unsupported("mlp_bias", true, "only false is supported")
	case r.PartialRotaryFactor != nil && *r.PartialRotaryFactor != 1:
		return unsupported("partial_rotary_factor", *r.PartialRotaryFactor, "only 1 is supported")
	}
	return nil
}

// maxSize bounds each size, so that no product of two of them and an element size overflows.
const maxSize = 1 << 24

func (r *rawConfig) sizes(c *Config, arch architecture) error {
	for _, f := range []struct {
		name string
		from *int
		to   *int
		max  int
	}{
		{"vocab_size", r.VocabSize, &c.Vocab, maxSize},
		{"hidden_size", r.HiddenSize, &c.Hidden, maxSize},
		{"intermediate_size", r.IntermediateSize, &c.Intermediate, maxSize},
		{"num_hidden_layers", r.Layers, &c.Layers, 4096},
		{"num_attention_heads", r.Heads, &c.Heads, 4096},
		{"max_position_embeddings", r.MaxPositions, &c.ContextLen, maxSize},
	} {
		if f.from == nil {
			return unsupported(f.name, "missing", "must be given")
		}
		if *f.from < 1 || *f.from > f.max {
			return unsupported(f.name, *f.from, fmt.Sprintf("must be 1 to %d", f.max))
		}
		*f.to = *f.from
	}
	switch {
	case r.KVHeads != nil:
		c.KVHeads = *r.KVHeads
	case arch.kvHeads:
		c.KVHeads = c.Heads
	default:
		return unsupported("num_key_value_heads", "missing", "must be given for "+arch.name)
	}
	if c.KVHeads < 1 || c.Heads%c.KVHeads != 0 {
		return unsupported("num_key_value_heads", c.KVHeads, fmt.Sprintf("must divide num_attention_heads, %d", c.Heads))
	}
	c.HeadSize = arch.headSize
	if r.HeadDim != nil {
		c.HeadSize = *r.HeadDim
	} else if c.HeadSize == 0 {
		if c.Hidden%c.Heads != 0 {
			return unsupported("hidden_size", c.Hidden, "must be a multiple of num_attention_heads when head_dim is not given")
		}
		c.HeadSize = c.Hidden / c.Heads
	}
	if c.HeadSize < 2 || c.HeadSize > 4096 || c.HeadSize%2 != 0 {
		return unsupported("head_dim", c.HeadSize, "must be even, 2 to 4096")
	}
	return nil
}

// checkTokens refuses special tokens that the model cannot make.
func checkTokens(c *Config) error {
	for _, t := range c.EOS {
		if t < 0 || int(t) >= c.Vocab {
			return unsupported("eos_token_id", t, fmt.Sprintf("must be below vocab_size, %d", c.Vocab))
		}
	}
	if c.BOS != nil && (*c.BOS < 0 || int(*c.BOS) >= c.Vocab) {
		return unsupported("bos_token_id", *c.BOS, fmt.Sprintf("must be below vocab_size, %d", c.Vocab))
	}
	return nil
}

// windows gives the sliding window of each layer.
func (r *rawConfig) windows(c *Config, arch architecture) ([]int, error) {
	windows := make([]int, c.Layers)
	if !arch.windowAlways && (!arch.windowOptional || !r.UseSlidingWindow) {
		for i, t := range r.LayerTypes {
			if t != "full_attention" {
				return nil, unsupported(fmt.Sprintf("layer_types[%d]", i), fmt.Sprintf("%q", t), "must be full_attention where no sliding window is in use")
			}
		}
		return windows, nil
	}
	size := arch.window
	if r.SlidingWindow != nil {
		size = 0
		if err := json.Unmarshal(r.SlidingWindow, &size); err != nil {
			return nil, unsupported("sliding_window", string(r.SlidingWindow), "must be a number of tokens or null")
		}
		if string(r.SlidingWindow) != "null" && (size < 1 || size > maxSize) {
			return nil, unsupported("sliding_window", size, fmt.Sprintf("must be 1 to %d, or null", maxSize))
		}
	}
	if r.LayerTypes != nil && len(r.LayerTypes) != c.Layers {
		return nil, unsupported("layer_types", fmt.Sprintf("%d entries", len(r.LayerTypes)), "must have one for each layer")
	}
	from := 0
	if arch.windowOptional {
		if from = 28; r.MaxWindowLayers != nil { // the default of transformers
			from = *r.MaxWindowLayers
		}
	}
	if r.WindowPattern != nil && *r.WindowPattern < 1 {
		return nil, unsupported("sliding_window_pattern", *r.WindowPattern, "must be at least 1")
	}
	for i := range windows {
		slides := i >= from
		if r.WindowPattern != nil { // the last of so many layers sees everything; layer_types say the same in newer files
			slides = slides && (i+1)%*r.WindowPattern != 0
		}
		if r.LayerTypes != nil {
			if slides = r.LayerTypes[i] == "sliding_attention"; !slides && r.LayerTypes[i] != "full_attention" {
				return nil, unsupported(fmt.Sprintf("layer_types[%d]", i), fmt.Sprintf("%q", r.LayerTypes[i]), "must be full_attention or sliding_attention")
			}
		}
		if slides {
			windows[i] = size
		}
	}
	return windows, nil
}
