package blockhash

import (
	"math/bits"
	"math/rand/v2"
	"slices"
	"testing"
)

// The values are part of the protocol between routers and nodes: a change must change all of them at once.
func TestValuesAreFixed(t *testing.T) {
	root := Root("0123456789abcdef", "")
	got := []Hash{root, Chain(root, []int32{1, 2, 3, 4}), Chain(root, nil)}
	want := []Hash{0xc3ef3d81aefb26b5, 0x9ce36579d1e8f4f8, 0xa97a05a9f8d9e3ed}
	if !slices.Equal(got, want) {
		t.Errorf("hashes %#x, want %#x", got, want)
	}
}

func TestRootSeparatesModelAndAdapter(t *testing.T) {
	roots := map[Hash][2]string{}
	for _, k := range [][2]string{{"", ""}, {"a", ""}, {"", "a"}, {"ab", "c"}, {"a", "bc"}, {"abc", ""}} {
		r := Root(k[0], k[1])
		if other, ok := roots[r]; ok {
			t.Errorf("%q and %q have the same root", k, other)
		}
		roots[r] = k
	}
}

func TestBlocksAreTheChain(t *testing.T) {
	tokens := []int32{5, 6, 7, 8, 9, 10, 11}
	root := Root("m", "")
	first := Chain(root, tokens[:3])
	want := []Hash{first, Chain(first, tokens[3:6])}
	if got := Blocks(nil, root, tokens, 3); !slices.Equal(got, want) {
		t.Errorf("blocks %#x, want %#x", got, want)
	}
	if got := Blocks(nil, root, tokens[:2], 3); len(got) != 0 {
		t.Errorf("a block that is not full got hash %#x", got)
	}
}

func TestChainDependsOnEveryToken(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	flipped, trials := 0, 4000
	for range trials {
		tokens := make([]int32, 1+rng.IntN(32))
		for i := range tokens {
			tokens[i] = rng.Int32N(100000)
		}
		parent := Hash(rng.Uint64())
		before := Chain(parent, tokens)
		tokens[rng.IntN(len(tokens))] ^= 1 << rng.IntN(17)
		after := Chain(parent, tokens)
		if before == after {
			t.Fatalf("a changed token in %v left the hash %#x", tokens, before)
		}
		flipped += bits.OnesCount64(uint64(before ^ after))
	}
	if mean := float64(flipped) / float64(trials); mean < 31 || mean > 33 {
		t.Errorf("a changed token flips %.2f bits on average, want about 32", mean)
	}
}

func BenchmarkChain(b *testing.B) {
	tokens := make([]int32, 32)
	h := Hash(0)
	for b.Loop() {
		h = Chain(h, tokens)
	}
	if h == 0 {
		b.Fatal("hash 0")
	}
}
