package sample

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"meridian.internal/shared/infer"
)

var nan, inf = float32(math.NaN()), float32(math.Inf(1))

func TestSampleChoosesOneToken(t *testing.T) {
	tests := []struct {
		name     string
		sampling infer.Sampling
		history  []int32
		prompt   int
		logits   []float32
		mask     []uint32
		want     int32
	}{
		{"greedy takes the largest", infer.Sampling{}, nil, 0, []float32{1, 3, 2}, nil, 1},
		{"a tie goes to the lowest id", infer.Sampling{}, nil, 0, []float32{1, 3, 3}, nil, 1},
		{"NaN is never chosen", infer.Sampling{}, nil, 0, []float32{nan, -5, nan}, nil, 1},
		{"NaN is never drawn", infer.Sampling{Temperature: 1}, nil, 0, []float32{nan, -5, nan}, nil, 1},
		{"an infinite logit is certain", infer.Sampling{Temperature: 1}, nil, 0, []float32{9, inf, 8}, nil, 1},
		{"the mask forbids", infer.Sampling{}, nil, 0, []float32{1, 3, 2}, []uint32{0b101}, 2},
		{"the mask forbids beyond its end", infer.Sampling{}, nil, 0, append(make([]float32, 32), 9), []uint32{1 << 7}, 7},
		{"bias moves the choice", infer.Sampling{LogitBias: map[int32]float32{0: 5}}, nil, 0, []float32{1, 3, 2}, nil, 0},
		{"bias outside the vocabulary is ignored", infer.Sampling{LogitBias: map[int32]float32{-1: 5, 3: 5}}, nil, 0, []float32{1, 3, 2}, nil, 1},
		{"bias does not lift the mask", infer.Sampling{LogitBias: map[int32]float32{0: 100}}, nil, 0, []float32{1, 3, 2}, []uint32{0b110}, 1},
		{"repetition divides a positive logit, prompt included", infer.Sampling{RepetitionPenalty: 2}, []int32{1}, 1, []float32{1, 3, 2}, nil, 2},
		{"repetition multiplies a negative logit", infer.Sampling{RepetitionPenalty: 2}, []int32{1}, 1, []float32{-3, -1, -1.5}, nil, 2},
		{"presence ignores the prompt", infer.Sampling{PresencePenalty: 2}, []int32{1}, 1, []float32{1, 3, 2}, nil, 1},
		{"presence counts output", infer.Sampling{PresencePenalty: 2}, []int32{0, 1}, 1, []float32{1, 3, 2}, nil, 2},
		{"frequency counts each time", infer.Sampling{FrequencyPenalty: 0.6}, []int32{0, 1, 1}, 1, []float32{1, 3, 2}, nil, 2},
		{"frequency once is too little", infer.Sampling{FrequencyPenalty: 0.6}, []int32{0, 1}, 1, []float32{1, 3, 2}, nil, 1},
		{"history outside the vocabulary is ignored", infer.Sampling{RepetitionPenalty: 2}, []int32{-1, 7}, 1, []float32{1, 3, 2}, nil, 1},
		{"top-k 1 is greedy", infer.Sampling{Temperature: 100, TopK: 1}, nil, 0, []float32{1, 3, 2}, nil, 1},
		{"a tiny top-p is greedy", infer.Sampling{Temperature: 100, TopP: 1e-9}, nil, 0, []float32{1, 3, 2}, nil, 1},
		{"min-p 1 is greedy", infer.Sampling{Temperature: 1, MinP: 1}, nil, 0, []float32{1, 3, 2}, nil, 1},
		{"a tiny temperature is greedy", infer.Sampling{Temperature: 1e-6}, nil, 0, []float32{1, 3, 2}, nil, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var s State
			var sc Scratch
			s.Reset(tt.sampling, tt.history, tt.prompt)
			before := slices.Clone(tt.logits)
			got, err := s.Sample(tt.logits, 5, tt.mask, &sc)
			if err != nil || got.Token != tt.want {
				t.Errorf("token %d, error %v; want %d", got.Token, err, tt.want)
			}
			for i, l := range tt.logits {
				if math.Float32bits(l) != math.Float32bits(before[i]) {
					t.Errorf("logit %d changed from %v to %v", i, before[i], l)
				}
			}
		})
	}
}

func TestSampleWithoutACandidateIsAnError(t *testing.T) {
	for name, in := range map[string]struct {
		logits []float32
		mask   []uint32
	}{
		"an empty mask":  {[]float32{1, 2}, []uint32{}},
		"only NaN":       {[]float32{nan, nan}, nil},
		"allowed is NaN": {[]float32{1, nan}, []uint32{2}},
		"no logits":      {nil, nil},
	} {
		var s State
		var sc Scratch
		if _, err := s.Sample(in.logits, 0, in.mask, &sc); !errors.Is(err, ErrNoToken) {
			t.Errorf("%s: error %v, want ErrNoToken", name, err)
		}
	}
}

// frequencies draws many positions and returns the share of each token.
func frequencies(t *testing.T, sampling infer.Sampling, logits []float32, draws int) []float64 {
	t.Helper()
	var s State
	var sc Scratch
	s.Reset(sampling, nil, 0)
	out := make([]float64, len(logits))
	for p := range draws {
		c, err := s.Sample(logits, p, nil, &sc)
		if err != nil {
			t.Fatal(err)
		}
		out[c.Token] += 1 / float64(draws)
	}
	return out
}

func TestDrawFollowsTheDistribution(t *testing.T) {
	logits := []float32{float32(math.Log(0.5)), float32(math.Log(0.3)), float32(math.Log(0.15)), float32(math.Log(0.05))}
	tests := []struct {
		name     string
		sampling infer.Sampling
		want     []float64
	}{
		{"temperature 1 is the softmax", infer.Sampling{Temperature: 1}, []float64{.5, .3, .15, .05}},
		{"temperature 0.5 squares", infer.Sampling{Temperature: .5}, []float64{.25 / .365, .09 / .365, .0225 / .365, .0025 / .365}},
		{"top-k 2 leaves two", infer.Sampling{Temperature: 1, TopK: 2}, []float64{.625, .375, 0, 0}},
		{"top-k beyond the vocabulary leaves all", infer.Sampling{Temperature: 1, TopK: 9}, []float64{.5, .3, .15, .05}},
		{"top-p 0.7 includes the token that crosses", infer.Sampling{Temperature: 1, TopP: .7}, []float64{.625, .375, 0, 0}},
		{"top-p 0.81 needs three", infer.Sampling{Temperature: 1, TopP: .81}, []float64{.5 / .95, .3 / .95, .15 / .95, 0}},
		{"top-p counts within top-k", infer.Sampling{Temperature: 1, TopK: 2, TopP: .6}, []float64{1, 0, 0, 0}},
		{"min-p is relative to the best", infer.Sampling{Temperature: 1, MinP: .4}, []float64{.625, .375, 0, 0}},
		{"min-p also after top-k", infer.Sampling{Temperature: 1, TopK: 3, MinP: .4}, []float64{.625, .375, 0, 0}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tt.sampling.Seed = 7
			got := frequencies(t, tt.sampling, logits, 40000)
			for i, w := range tt.want {
				if math.Abs(got[i]-w) > 0.012 || (w == 0 && got[i] != 0) { // 0.012: over four standard deviations
					t.Errorf("token %d drawn with share %.4f, want %.4f", i, got[i], w)
				}
			}
		})
	}
}

// TestNucleusMatchesASort compares the heap with the plain way: sort everything, then cut.
func TestNucleusMatchesASort(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 3000 {
		n := 1 + rng.IntN(40)
		all := make([]candidate, n)
		for i := range all {
			all[i] = candidate{-float64(rng.IntN(8)), int32(i)} // few values: many ties
		}
		k, p := rng.IntN(n+3), rng.Float64()*1.2
		want := slices.Clone(all)
		slices.SortFunc(want, func(a, b candidate) int {
			if a.before(b) {
				return -1
			}
			return 1
		})
		if k > 0 && k < n {
			want = want[:k]
		}
		if p > 0 && p < 1 {
			sum := 0.0
			for _, c := range want {
				sum += math.Exp(c.w)
			}
			want = want[:reach(want, p*sum)]
		}
		got := nucleus(slices.Clone(all), k, p)
		if d := len(got) - len(want); d < -1 || d > 1 || !slices.Equal(got[:min(len(got), len(want))], want[:min(len(got), len(want))]) {
			t.Fatalf("nucleus(k=%d, p=%v) = %v, want %v", k, p, got, want)
		}
	}
}

func TestNoiseIsAFunctionOfSeedAndPosition(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	logits := make([]float32, 500)
	for i := range logits {
		logits[i] = rng.Float32() * 3
	}
	draw := func(seed uint64, position int) int32 {
		var s State
		var sc Scratch
		s.Reset(infer.Sampling{Temperature: 1, Seed: seed}, nil, 0)
		c, err := s.Sample(logits, position, nil, &sc)
		if err != nil {
			t.Fatal(err)
		}
		return c.Token
	}
	same, seeds, positions := 0, map[int32]bool{}, map[int32]bool{}
	for i := range 200 {
		if once, again := draw(uint64(i), i), draw(uint64(i), i); once == again {
			same++
		}
		seeds[draw(uint64(i), 3)] = true
		positions[draw(3, i)] = true
	}
	if same != 200 || len(seeds) < 100 || len(positions) < 100 {
		t.Errorf("equal draws %d of 200; distinct over seeds %d, over positions %d (of 200 each)", same, len(seeds), len(positions))
	}
}

// TestPruningChangesNoChoice compares the draw with one that looks at the noise of every token.
func TestPruningChangesNoChoice(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	var sc Scratch
	for trial := range 300 {
		logits := make([]float32, 1+rng.IntN(300))
		for i := range logits {
			logits[i] = float32(rng.NormFloat64() * 8)
		}
		var s State
		s.Reset(infer.Sampling{Temperature: 1.5, Seed: uint64(trial)}, nil, 0)
		got, err := s.Sample(logits, trial, nil, &sc)
		if err != nil {
			t.Fatal(err)
		}
		best, _ := argmax(logits)
		key := mix(mix(uint64(trial)) ^ uint64(trial))
		want, score := int32(-1), math.Inf(-1)
		for i, l := range logits {
			if v := (float64(l)-float64(logits[best]))/1.5 + gumbel(key, int32(i)); v > score {
				want, score = int32(i), v
			}
		}
		if got.Token != want {
			t.Fatalf("trial %d: drew %d, want %d", trial, got.Token, want)
		}
	}
}

func TestLogprobsAreThoseOfTheModel(t *testing.T) {
	logits := []float32{float32(math.Log(0.5)), float32(math.Log(0.3)), nan, float32(math.Log(0.2)), float32(math.Inf(-1))}
	var s State
	var sc Scratch
	// Mask and temperature change the choice, not the probabilities that are reported.
	s.Reset(infer.Sampling{Temperature: 0.1, Logprobs: true, TopLogprobs: 10}, nil, 0)
	c, err := s.Sample(logits, 0, []uint32{0b1000}, &sc)
	if err != nil || c.Token != 3 {
		t.Fatalf("token %d, error %v", c.Token, err)
	}
	near := func(got float32, want float64) bool { return math.Abs(float64(got)-want) < 1e-6 }
	if !near(c.Logprobs.Logprob, math.Log(0.2)) {
		t.Errorf("logprob %v, want %v", c.Logprobs.Logprob, math.Log(0.2))
	}
	if top := c.Logprobs.Top; len(top) != 3 || top[0].Token != 0 || top[1].Token != 1 || top[2].Token != 3 || !near(top[1].Logprob, math.Log(0.3)) {
		t.Errorf("top %v, want tokens 0, 1, 3", top)
	}
	s.Reset(infer.Sampling{}, nil, 0)
	if c, _ := s.Sample(logits, 0, nil, &sc); c.Logprobs.Top != nil || c.Logprobs.Logprob != 0 || s.Logprobs() {
		t.Errorf("logprobs %v though not asked for", c.Logprobs)
	}
}

func TestStateRemembersWhatItSampled(t *testing.T) {
	var s State
	var sc Scratch
	s.Reset(infer.Sampling{FrequencyPenalty: 1}, nil, 0)
	logits := []float32{2.5, 2, 1}
	var got []int32
	for p := range 6 {
		c, err := s.Sample(logits, p, nil, &sc)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, c.Token)
	}
	if want := []int32{0, 1, 0, 1, 2, 0}; !slices.Equal(got, want) {
		t.Errorf("tokens %v, want %v", got, want)
	}
	resumed := State{}
	resumed.Reset(infer.Sampling{FrequencyPenalty: 1}, []int32{0, 1, 0, 1}, 0)
	if c, _ := resumed.Sample(logits, 4, nil, &sc); c.Token != 2 {
		t.Errorf("resumed with history: token %d, want 2", c.Token)
	}
	s.Reset(infer.Sampling{FrequencyPenalty: 1}, nil, 0)
	if c, _ := s.Sample(logits, 0, nil, &sc); c.Token != 0 {
		t.Errorf("after Reset: token %d, want 0", c.Token)
	}
}

func TestSampleDoesNotAllocate(t *testing.T) {
	logits := make([]float32, 4096)
	for i := range logits {
		logits[i] = float32(i%97) / 10
	}
	var s State
	var sc Scratch
	s.Reset(infer.Sampling{Temperature: 1, TopP: 0.9, RepetitionPenalty: 1.1, Seed: 1}, []int32{1, 2, 3}, 2)
	mask := make([]uint32, 128)
	for i := range mask {
		mask[i] = 0xfffffff0
	}
	p := 0
	for range 3000 { // let the counts meet every token that they will meet
		if _, err := s.Sample(logits, p, mask, &sc); err != nil {
			t.Fatal(err)
		}
		p++
	}
	if n := testing.AllocsPerRun(50, func() { _, _ = s.Sample(logits, p%3000, mask, &sc) }); n > 0 {
		t.Errorf("%v allocations a sample, want 0", n)
	}
}

func FuzzSample(f *testing.F) {
	f.Add([]byte{1, 2, 3, 250}, float32(0.7), 3, float32(0.9), float32(0.05), uint64(1))
	f.Add([]byte{0}, float32(0), 0, float32(0), float32(0), uint64(0))
	f.Fuzz(func(t *testing.T, row []byte, temperature float32, k int, p, minP float32, seed uint64) {
		logits := make([]float32, len(row))
		for i, b := range row {
			logits[i] = float32(int8(b))
		}
		var s State
		var sc Scratch
		s.Reset(infer.Sampling{Temperature: temperature, TopK: k, TopP: p, MinP: minP, Seed: seed, Logprobs: true}, nil, 0)
		c, err := s.Sample(logits, 1, nil, &sc)
		if len(row) == 0 {
			if !errors.Is(err, ErrNoToken) {
				t.Fatalf("no logits: error %v", err)
			}
			return
		}
		if err != nil || c.Token < 0 || int(c.Token) >= len(row) || c.Logprobs.Logprob > 0 {
			t.Fatalf("token %d of %d, logprob %v, error %v", c.Token, len(row), c.Logprobs.Logprob, err)
		}
	})
}

func BenchmarkSample(b *testing.B) {
	rng := rand.New(rand.NewPCG(7, 8))
	logits := make([]float32, 32768)
	for i := range logits {
		logits[i] = float32(rng.NormFloat64() * 3)
	}
	for name, sampling := range map[string]infer.Sampling{
		"greedy":      {},
		"temperature": {Temperature: 0.8},
		"top-p":       {Temperature: 0.8, TopP: 0.95},
		"top-k":       {Temperature: 0.8, TopK: 50},
	} {
		b.Run(name, func(b *testing.B) {
			var s State
			var sc Scratch
			s.Reset(sampling, nil, 0)
			for p := 0; b.Loop(); p++ {
				if _, err := s.Sample(logits, p, nil, &sc); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
