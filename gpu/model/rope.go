package model

import (
	"encoding/json"
	"fmt"
	"math"
)

// RoPE describes the rotation of queries and keys: pair (i, i+HeadSize/2) of a head turns by position * InvFreq[i], and
// the result is multiplied by Scale.
type RoPE struct {
	Type        string  // "default", "linear", "llama3", "yarn"
	Theta       float64 // base of the frequencies
	Factor      float64 // how much further positions reach; 1 for "default"
	LowFreq     float64 // llama3: low_freq_factor
	HighFreq    float64 // llama3: high_freq_factor
	OriginalLen int     // llama3, yarn: context length before scaling, tokens
	BetaFast    float64 // yarn: rotations within OriginalLen from which on a frequency is kept
	BetaSlow    float64 // yarn: rotations below which a frequency is divided by Factor
	Truncate    bool    // yarn: the borders between the two are rounded to whole dimensions
	Scale       float64 // yarn: multiplies cosine and sine (attention factor); else 1
}

// String is the canonical description: equal strings mean equal rotations, for heads of one size.
func (r RoPE) String() string {
	switch r.Type {
	case "llama3":
		return fmt.Sprintf("llama3 theta=%g factor=%g low=%g high=%g original=%d", r.Theta, r.Factor, r.LowFreq, r.HighFreq, r.OriginalLen)
	case "yarn":
		return fmt.Sprintf("yarn theta=%g factor=%g fast=%g slow=%g original=%d truncate=%t scale=%g",
			r.Theta, r.Factor, r.BetaFast, r.BetaSlow, r.OriginalLen, r.Truncate, r.Scale)
	case "linear":
		return fmt.Sprintf("linear theta=%g factor=%g", r.Theta, r.Factor)
	}
	return fmt.Sprintf("default theta=%g", r.Theta)
}

// InvFreq gives the angle in radians by which each of the headSize/2 pairs turns per position.
func (r RoPE) InvFreq(headSize int) []float64 {
	freq := make([]float64, headSize/2)
	for i := range freq {
		freq[i] = math.Pow(r.Theta, -float64(2*i)/float64(headSize))
	}
	switch r.Type {
	case "linear":
		for i := range freq {
			freq[i] /= r.Factor
		}
	case "llama3":
		r.llama3(freq)
	case "yarn":
		r.yarn(freq, headSize)
	}
	return freq
}

// llama3 keeps the frequencies that turn HighFreq times or more within the original context, divides those that turn
// fewer than LowFreq times by Factor, and goes linearly from one to the other between.
func (r RoPE) llama3(freq []float64) {
	for i, f := range freq {
		turns := float64(r.OriginalLen) * f / (2 * math.Pi)
		switch {
		case turns < r.LowFreq:
			freq[i] = f / r.Factor
		case turns <= r.HighFreq:
			smooth := (turns - r.LowFreq) / (r.HighFreq - r.LowFreq)
			freq[i] = (1-smooth)*f/r.Factor + smooth*f
		}
	}
}

// yarn does the same over the index of the pair, between the indices that turn BetaFast and BetaSlow times
// (arXiv:2309.00071, "NTK-by-parts").
func (r RoPE) yarn(freq []float64, headSize int) {
	at := func(turns float64) float64 {
		return float64(headSize) * math.Log(float64(r.OriginalLen)/(turns*2*math.Pi)) / (2 * math.Log(r.Theta))
	}
	low, high := at(r.BetaFast), at(r.BetaSlow)
	if r.Truncate {
		low, high = math.Floor(low), math.Ceil(high)
	}
	low, high = max(low, 0), min(high, float64(headSize-1))
	if low == high {
		high += 0.001 // a step instead of a division by zero
	}
	for i, f := range freq {
		slow := min(max((float64(i)-low)/(high-low), 0), 1)
		freq[i] = f/r.Factor*slow + f*(1-slow)
	}
}

// rawRope holds the keys of rope_scaling (old form) or rope_parameters (new form, with rope_theta inside).
type rawRope struct {
	RopeType            *string  `json:"rope_type"`
	Type                *string  `json:"type"` // the oldest spelling
	RopeTheta           *float64 `json:"rope_theta"`
	Factor              *float64 `json:"factor"`
	LowFreqFactor       *float64 `json:"low_freq_factor"`
	HighFreqFactor      *float64 `json:"high_freq_factor"`
	OriginalLen         *int     `json:"original_max_position_embeddings"`
	AttentionFactor     *float64 `json:"attention_factor"`
	BetaFast            *float64 `json:"beta_fast"`
	BetaSlow            *float64 `json:"beta_slow"`
	MScale              *float64 `json:"mscale"`
	MScaleAllDim        *float64 `json:"mscale_all_dim"`
	Truncate            *bool    `json:"truncate"`
	PartialRotaryFactor *float64 `json:"partial_rotary_factor"`
	FullAttention       any      `json:"full_attention"` // parameters by layer type, which none of our architectures has
}

func (r *rawConfig) rope(c *Config) (RoPE, error) {
	field, data := "rope_parameters", r.RopeParameters
	if data == nil {
		field, data = "rope_scaling", r.RopeScaling
	}
	var raw rawRope
	if data != nil {
		if err := json.Unmarshal(*data, &raw); err != nil {
			return RoPE{}, fmt.Errorf("%w: %s: %w", ErrConfig, field, err)
		}
	}
	if raw.FullAttention != nil {
		return RoPE{}, unsupported(field+".full_attention", "present", "only one set of parameters for all layers is supported")
	}
	if f := raw.PartialRotaryFactor; f != nil && *f != 1 {
		return RoPE{}, unsupported(field+".partial_rotary_factor", *f, "only 1 is supported")
	}
	out := RoPE{Type: "default", Theta: 10000, Factor: 1, Scale: 1}
	for _, name := range []*string{raw.Type, raw.RopeType} {
		if name != nil {
			out.Type = *name
		}
	}
	for _, theta := range []*float64{r.RopeTheta, raw.RopeTheta} {
		if theta != nil {
			out.Theta = *theta
		}
	}
	if !(out.Theta > 1 && out.Theta < 1e30) {
		return RoPE{}, unsupported("rope_theta", out.Theta, "must be above 1")
	}
	return out, raw.scaling(&out, field, c)
}

// scaling fills what the type needs.
func (raw *rawRope) scaling(out *RoPE, field string, c *Config) error {
	need := func(name string, from *float64, to *float64) error {
		if from == nil {
			return unsupported(field+"."+name, "missing", "must be given for "+out.Type)
		}
		if !(*from > 0 && *from < 1e9) {
			return unsupported(field+"."+name, *from, "must be above 0")
		}
		*to = *from
		return nil
	}
	switch out.Type {
	case "default":
		return nil
	case "linear":
		return need("factor", raw.Factor, &out.Factor)
	case "llama3":
		for _, f := range []struct {
			name string
			from *float64
			to   *float64
		}{{"factor", raw.Factor, &out.Factor}, {"low_freq_factor", raw.LowFreqFactor, &out.LowFreq}, {"high_freq_factor", raw.HighFreqFactor, &out.HighFreq}} {
			if err := need(f.name, f.from, f.to); err != nil {
				return err
			}
		}
		if out.HighFreq <= out.LowFreq {
			return unsupported(field+".high_freq_factor", out.HighFreq, "must be above low_freq_factor")
		}
		if raw.OriginalLen == nil {
			return unsupported(field+".original_max_position_embeddings", "missing", "must be given for llama3")
		}
		return raw.originalLen(out, field, c)
	case "yarn":
		if err := need("factor", raw.Factor, &out.Factor); err != nil {
			return err
		}
		if err := raw.originalLen(out, field, c); err != nil {
			return err
		}
		return raw.yarn(out, field)
	}
	return unsupported(field+".rope_type", fmt.Sprintf("%q", out.Type), "must be default, linear, llama3 or yarn")
}

func (raw *rawRope) originalLen(out *RoPE, field string, c *Config) error {
	out.OriginalLen = c.ContextLen
	if raw.OriginalLen != nil {
		out.OriginalLen = *raw.OriginalLen
	}
	if out.OriginalLen < 1 || out.OriginalLen > maxSize {
		return unsupported(field+".original_max_position_embeddings", out.OriginalLen, fmt.Sprintf("must be 1 to %d", maxSize))
	}
	return nil
}

func (raw *rawRope) yarn(out *RoPE, field string) error {
	out.BetaFast, out.BetaSlow, out.Truncate = 32, 1, true
	if raw.BetaFast != nil && *raw.BetaFast != 0 {
		out.BetaFast = *raw.BetaFast
	}
	if raw.BetaSlow != nil && *raw.BetaSlow != 0 {
		out.BetaSlow = *raw.BetaSlow
	}
	if !(out.BetaSlow > 0 && out.BetaFast >= out.BetaSlow && out.BetaFast < 1e9) {
		return unsupported(field+".beta_fast", out.BetaFast, fmt.Sprintf("must not be below beta_slow, %g, and both above 0", out.BetaSlow))
	}
	if raw.Truncate != nil {
		out.Truncate = *raw.Truncate
	}
	mscale := func(m float64) float64 {
		if out.Factor <= 1 {
			return 1
		}
		return 0.1*m*math.Log(out.Factor) + 1
	}
	switch {
	case raw.AttentionFactor != nil:
		out.Scale = *raw.AttentionFactor
	case raw.MScale != nil && raw.MScaleAllDim != nil && *raw.MScale != 0 && *raw.MScaleAllDim != 0:
		out.Scale = mscale(*raw.MScale) / mscale(*raw.MScaleAllDim)
	default:
		out.Scale = mscale(1)
	}
	if !(out.Scale > 0 && out.Scale < 1e6) {
		return unsupported(field+".attention_factor", out.Scale, "must be above 0")
	}
	return nil
}
