package model

import (
	"math"
	"testing"
)

// The frequencies below are the formulas of transformers' modeling_rope_utils, worked out by hand at the pairs where
// something happens: first, last, and between the borders.
func TestInvFreq(t *testing.T) {
	const theta = 10000.0
	plain := func(i int) float64 { return math.Pow(theta, -float64(i)/32) } // head size 64
	for _, tc := range []struct {
		name, rope string
		want       map[int]float64
		scale      float64
	}{
		{"default", `"rope_theta":10000`, map[int]float64{0: 1, 8: 0.1, 16: 0.01, 31: plain(31)}, 1},
		{"new form", `"rope_parameters":{"rope_theta":10000,"rope_type":"default"}`, map[int]float64{0: 1, 16: 0.01}, 1},
		{"old form with null scaling", `"rope_theta":100,"rope_scaling":null`, map[int]float64{16: 0.1}, 1},
		{"linear divides all", `"rope_scaling":{"type":"linear","factor":4}`, map[int]float64{0: 0.25, 16: 0.0025}, 1},
		{"llama3 keeps the fast, divides the slow, blends between",
			`"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,"high_freq_factor":4,"original_max_position_embeddings":512}`,
			// turns = 512 f / 2π: pair 8 turns 8.1 times, pair 16 turns 0.81 times, pair 12 turns 2.577 times
			map[int]float64{8: 0.1, 16: 0.01 / 8, 12: func() float64 {
				f := plain(12)
				s := (512*f/(2*math.Pi) - 1) / 3
				return (1-s)*f/8 + s*f
			}()}, 1},
		{"yarn blends over the index of the pair",
			`"rope_scaling":{"rope_type":"yarn","factor":4,"original_max_position_embeddings":2048}`,
			// border = 64 ln(2048/(32·2π)) / (2 ln 10000) = 8.06 and 64 ln(2048/2π) / (2 ln 10000) = 20.1: 8 and 21
			map[int]float64{8: 0.1, 21: plain(21) / 4, 14: plain(14)/4*6/13 + plain(14)*7/13}, 0.1*math.Log(4) + 1},
		{"yarn with mscale for all dimensions has no scale",
			`"rope_scaling":{"rope_type":"yarn","factor":4,"mscale":1,"mscale_all_dim":1}`, map[int]float64{0: 1}, 1},
		{"yarn with an attention factor", `"rope_scaling":{"rope_type":"yarn","factor":4,"attention_factor":1.5}`, map[int]float64{0: 1}, 1.5},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, err := ParseConfig(config("LlamaForCausalLM", `"head_dim":64,`+tc.rope))
			if err != nil {
				t.Fatal(err)
			}
			freq := c.RoPE.InvFreq(64)
			for i, want := range tc.want {
				if math.Abs(freq[i]-want) > 1e-12 {
					t.Errorf("pair %d: got %g, want %g", i, freq[i], want)
				}
			}
			if math.Abs(c.RoPE.Scale-tc.scale) > 1e-12 {
				t.Errorf("scale %g, want %g", c.RoPE.Scale, tc.scale)
			}
		})
	}
}

func TestRoPEStringTellsRotationsApart(t *testing.T) {
	base := RoPE{Theta: 1e4, Factor: 2, LowFreq: 1, HighFreq: 4, OriginalLen: 512, BetaFast: 32, BetaSlow: 1, Scale: 1}
	seen := map[string]bool{}
	for _, kind := range []string{"default", "linear", "llama3", "yarn"} {
		r := base
		r.Type = kind
		for _, theta := range []float64{1e4, 5e5} {
			if r.Theta = theta; seen[r.String()] {
				t.Errorf("%q is there twice", r)
			}
			seen[r.String()] = true
		}
	}
}
