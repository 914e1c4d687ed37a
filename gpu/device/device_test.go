package device

import (
	"context"
	"errors"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"meridian.internal/gpu/engine"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
)

// defaults are the values of the tags.
func defaults(edit func(*Options)) Options {
	o := Options{Device: "cpu", MaxNumTokens: 256, MaxBatchSize: 8, MaxWaiting: 8, TokensPerBlock: 16, Ranks: 1, PP: 1, Overlap: true, PrefixReuse: true}
	if edit != nil {
		edit(&o)
	}
	return o
}

func now() int64 { return time.Now().UnixNano() }

func TestOptionsThatCannotBeAreRefusedByName(t *testing.T) {
	for _, c := range []struct {
		want string
		edit func(*Options)
	}{
		{"--ranks 65: must be at most 64", func(o *Options) { o.Ranks = 65 }},
		{"--pp 257: must be at most 256", func(o *Options) { o.PP = 257 }},
		{"--pp 99: the model has", func(o *Options) { o.PP = 99 }},
		{"--kv-host-memory 1024 keeps blocks for reuse", func(o *Options) { o.KVHostMemory, o.PrefixReuse = 1024, false }},
		{"--device cuda: not available", func(o *Options) { o.Device = "cuda" }},
		{"--ranks 0: must be at least 1", func(o *Options) { o.Ranks = 0 }},
		{"--max-batch-size 0", func(o *Options) { o.MaxBatchSize = 0 }},
		{"--max-num-tokens 4: must be at least --max-batch-size", func(o *Options) { o.MaxNumTokens = 4 }},
		{"--tokens-per-block -1", func(o *Options) { o.TokensPerBlock = -1 }},
		{"give one of them", func(o *Options) { o.KVBlocks, o.KVMemory = 1, 1 }},
		{"--gpu-memory-fraction 1.5: must be from 0 to 1", func(o *Options) { o.MemoryFraction = 1.5 }},
		{"--gpu-memory-fraction 0.5: is for --device cuda", func(o *Options) { o.MemoryFraction = 0.5 }},
		{"--weight-type fp8, --kv-type bf16: fp8 is for --device cuda", func(o *Options) { o.WeightType, o.KVType = "fp8", "bf16" }},
		{"--gpu [1]: is for --device cuda", func(o *Options) { o.GPUs = []int{1} }},
		{"--gpu -1: must not be negative", func(o *Options) { o.GPUs = []int{0, -1} }},
		{"--gpu names 3 cards: --ranks 2 and --pp 1 use 2 of them", func(o *Options) { o.GPUs, o.Ranks = []int{0, 1, 2}, 2 }},
		{"--kv-blocks 1000000000, --kv-memory 0, --kv-host-memory 0: a rank would keep", func(o *Options) { o.KVBlocks = 1e9 }},
		{"--kv-host-memory 1125899906842624: a rank would keep", func(o *Options) { o.KVHostMemory = 1 << 50 }},
		{"--kv-blocks 2147483648: must be at most 2147483647", func(o *Options) { o.KVBlocks = 1 << 31 }},
		{"--tokens-per-block 1000000: must be at most", func(o *Options) { o.TokensPerBlock = 1e6 }},
		{"--max-batch-size 1000000: must be at most", func(o *Options) { o.MaxBatchSize, o.MaxNumTokens = 1e6, 1e6 }},
		{"--kv-memory 5", func(o *Options) { o.KVMemory = 5 }},
		{"--sim-*", func(o *Options) { o.Sim.Step = -1 }},
		{`--model "/no/such/folder"`, func(o *Options) { o.Model = "/no/such/folder" }},
	} {
		if cudaBuilt && strings.Contains(c.want, "cuda") {
			continue // this build has it
		}
		if _, err := Open(t.Context(), defaults(c.edit), now, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %q", err, c.want)
		}
	}
}

func TestStagesAndRanksTakeTheCardsInTurn(t *testing.T) {
	type at struct {
		card  int
		share float64
	}
	for _, c := range []struct {
		ranks, pp int
		gpus      []int
		want      []at // rank after rank
	}{
		{1, 1, nil, []at{{0, .8}}},
		{2, 1, []int{1}, []at{{1, .4}, {1, .4}}},
		{2, 1, []int{0, 1}, []at{{0, .8}, {1, .8}}},
		{2, 2, []int{0, 1}, []at{{0, .4}, {1, .4}, {0, .4}, {1, .4}}},
		{2, 2, []int{4, 5, 6, 7}, []at{{4, .8}, {5, .8}, {6, .8}, {7, .8}}},
		{3, 1, []int{0, 1}, []at{{0, .4}, {1, .8}, {0, .4}}},
	} {
		o := defaults(func(o *Options) { o.Ranks, o.PP, o.GPUs, o.MemoryFraction = c.ranks, c.pp, c.gpus, .8 })
		var got []at
		for rank := range c.ranks {
			layer := 0
			for _, p := range o.parts(rank, 7) {
				if p.stage.First != layer {
					t.Errorf("%d stages: one begins at layer %d, the one before ends at %d", c.pp, p.stage.First, layer)
				}
				layer = p.stage.End
				got = append(got, at{p.card, p.share})
			}
			if layer != 7 {
				t.Errorf("%d stages of 7 layers end at %d", c.pp, layer)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%d ranks of %d stages on %v: %v, want %v", c.ranks, c.pp, c.gpus, got, c.want)
		}
	}
}

func TestBothDevicesAnswerARequest(t *testing.T) {
	names := []string{"cpu", "sim"}
	if cudaBuilt {
		names = append(names, "cuda")
	}
	for _, name := range names {
		d, err := Open(t.Context(), defaults(func(o *Options) { o.Device = name }), now, slog.New(slog.DiscardHandler))
		if name == "cuda" && err != nil && strings.Contains(err.Error(), "not available on this machine") {
			t.Logf("left out: %v", err)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var run sync.WaitGroup
		run.Go(func() {
			if err := d.Engine.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		s, err := d.Engine.Submit(infer.Request{ID: 1, Prompt: d.Tokenizer.Encode("The river", true), MaxTokens: 5, IgnoreEOS: true})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for done := (*infer.Done)(nil); done == nil; {
			var tokens []infer.Token
			if tokens, done, err = s.Next(ctx); err != nil {
				t.Fatal(err)
			}
			n += len(tokens)
		}
		if n != 5 {
			t.Errorf("%s gave %d tokens, want 5", name, n)
		}
		cancel()
		run.Wait()
		if _, err := d.Engine.Submit(infer.Request{ID: 2, Prompt: []int32{1}, MaxTokens: 1}); Kind(err) != Stopped {
			t.Errorf("%s: after its end: %v", name, err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestTheClockOfACardIsAgainstThatOfItsProcess(t *testing.T) {
	known := func(local clock.ID) cardClock {
		return func() (clock.Estimate, bool) { return clock.Estimate{Local: local, OffsetNS: 5}, local != "" }
	}
	d := &Device{clockID: "p", cardClocks: map[int]cardClock{4: known("d"), 2: known("b"), 3: known("")}}
	if got, want := d.CardClocks(), []clock.Estimate{{Reference: "p", Local: "b", OffsetNS: 5}, {Reference: "p", Local: "d", OffsetNS: 5}}; !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestKindsTellErrorsApart(t *testing.T) {
	if k := Kind(errors.Join(errors.New("x"), engine.ErrQueueFull)); k != Busy {
		t.Errorf("got %q", k)
	}
	if k := Kind(errors.New("x")); k != "" {
		t.Errorf("got %q", k)
	}
}

func TestRanksHaveCardsInTurn(t *testing.T) {
	for _, c := range []struct {
		ranks, pp int
		gpus      []int
		want      [][]int
	}{
		{1, 1, []int{3}, [][]int{{0}}}, {2, 1, []int{3, 5}, [][]int{{0}, {1}}}, {2, 2, []int{3, 5}, [][]int{{0, 1}, {0, 1}}},
		{2, 2, []int{3, 5, 6, 7}, [][]int{{0, 1}, {2, 3}}}, {2, 3, []int{4}, [][]int{{0}, {0}}},
		{2, 1, []int{5, 3}, [][]int{{1}, {0}}}, {3, 1, []int{5, 3, 5}, [][]int{{1}, {0}, {1}}},
	} {
		o := Options{Ranks: c.ranks, PP: c.pp, GPUs: c.gpus}
		if got := o.rankCards(); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%d ranks of %d stages on %v: %v, want %v", c.ranks, c.pp, c.gpus, got, c.want)
		}
	}
}
