// Package blockhash owns the name of a KV block by content: a chained 64-bit hash over the token ids of a prefix, cut
// into blocks, with the identity of model and adapter as root. Nodes index their caches by it and routers predict hits
// with it. It is pure, and holds no index. 64 bits can collide: who attaches a block by its hash must compare the tokens.
package blockhash

// Hash names a prefix that ends with a block. Equal prefixes under equal roots and block sizes have equal hashes on all
// machines.
type Hash uint64

// The multipliers of xxHash64's rounds: odd, and well spread.
const (
	prime1 = 0x9e3779b185ebca87
	prime2 = 0xc2b2ae3d27d4eb4f
)

// Root is the hash before the first block: nothing matches across models or adapters. The adapter is "" for none.
func Root(modelHash, adapter string) Hash {
	h := uint64(len(modelHash)) // a length prefix: ("ab", "c") differs from ("a", "bc")
	for _, s := range []string{modelHash, adapter} {
		for i := range len(s) {
			h = round(h, uint64(s[i]))
		}
	}
	return Hash(finish(h))
}

// Chain extends a prefix by the tokens of one block.
func Chain(parent Hash, tokens []int32) Hash {
	h := round(uint64(parent), uint64(len(tokens)))
	for _, t := range tokens {
		h = round(h, uint64(uint32(t)))
	}
	return Hash(finish(h))
}

// Blocks appends to dst the hash of each full block of the tokens. A last block that is not full has no hash.
func Blocks(dst []Hash, root Hash, tokens []int32, perBlock int) []Hash {
	for h := root; len(tokens) >= perBlock; tokens = tokens[perBlock:] {
		h = Chain(h, tokens[:perBlock])
		dst = append(dst, h)
	}
	return dst
}

func round(h, v uint64) uint64 {
	h ^= v * prime2
	return (h<<31|h>>33)*prime1 + prime2
}

// finish is the finalizer of SplitMix64: each input bit reaches each output bit.
func finish(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
