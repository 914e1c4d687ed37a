package token

import (
	"fmt"
	"math/bits"
	"math/rand/v2"
	"strings"

	"encoding/json"
)

// mergePair is one of "merges": "a b" in older files, ["a", "b"] in newer ones, where a side may hold a space.
type mergePair [2]string

// UnmarshalJSON reads both forms.
func (p *mergePair) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '"' {
		var s string
		if err := json.Unmarshal(data, &s); err != nil {
			return err
		}
		left, right, ok := strings.Cut(s, " ")
		if !ok || strings.Contains(right, " ") {
			return fmt.Errorf("model.merges: %q is not two tokens with one space between them", s)
		}
		*p = mergePair{left, right}
		return nil
	}
	var pair []string
	if err := json.Unmarshal(data, &pair); err != nil {
		return err
	}
	if len(pair) != 2 {
		return fmt.Errorf("model.merges: %q is not two tokens", pair)
	}
	*p = mergePair{pair[0], pair[1]}
	return nil
}

// noMerge is the value of a pair that is never joined. It sorts after every merge.
const noMerge = ^uint64(0)

// merge packs a rank (its place in the list) and the id that results, so that comparing values compares ranks.
func merge(rank int, id int32) uint64 { return uint64(rank)<<32 | uint64(uint32(id)) }

// pairTable maps a pair of ids to its merge: a hash table with open addressing, several times as fast as a map. It is
// seeded, so that no file can be made to collide.
type pairTable struct {
	keys  []uint64 // left<<32 | right; noMerge is an empty slot
	vals  []uint64
	seed  uint64
	shift uint
}

func newPairTable(n int) pairTable {
	size := 1 << bits.Len(uint(2*n+1))
	t := pairTable{
		keys: make([]uint64, size), vals: make([]uint64, size),
		seed: rand.Uint64() | 1, shift: uint(64 - bits.TrailingZeros(uint(size))),
	}
	for i := range t.keys {
		t.keys[i] = noMerge
	}
	return t
}

func (t *pairTable) slot(key uint64) uint64 {
	hi, lo := bits.Mul64(key^t.seed, 0x9E3779B97F4A7C15^t.seed<<1)
	return (hi ^ lo) * 0x9E3779B97F4A7C15 >> t.shift
}

// put stores a merge; of two for the same pair the later one counts, as in Hugging Face's library.
func (t *pairTable) put(left, right int32, val uint64) {
	key := uint64(uint32(left))<<32 | uint64(uint32(right))
	mask := uint64(len(t.keys) - 1)
	i := t.slot(key) & mask
	for t.keys[i] != noMerge && t.keys[i] != key {
		i = (i + 1) & mask
	}
	t.keys[i], t.vals[i] = key, val
}

// get returns the merge of a pair, or noMerge.
func (t *pairTable) get(left, right int32) uint64 {
	key := uint64(uint32(left))<<32 | uint64(uint32(right))
	mask := uint64(len(t.keys) - 1)
	for i := t.slot(key) & mask; ; i = (i + 1) & mask {
		switch t.keys[i] {
		case key:
			return t.vals[i]
		case noMerge:
			return noMerge
		}
	}
}

// shortPiece is where scanning for the best pair stops being faster than a heap.
const shortPiece = 64

// join merges ids in place until no pair can be joined: the lowest rank first, the leftmost of equal ones.
func (t *pairTable) join(ids []int32) []int32 {
	switch {
	case len(ids) < 2:
		return ids
	case len(ids) <= shortPiece:
		return t.joinShort(ids)
	}
	return t.joinLong(ids)
}

func (t *pairTable) joinShort(ids []int32) []int32 {
	var buf [shortPiece]uint64
	vals := buf[:len(ids)-1] // vals[i] is the merge of ids[i] and ids[i+1]
	for i := range vals {
		vals[i] = t.get(ids[i], ids[i+1])
	}
	for {
		best, at := noMerge, 0
		for i, v := range vals {
			if v < best {
				best, at = v, i
			}
		}
		if best == noMerge {
			return ids
		}
		ids[at] = int32(uint32(best))
		ids = append(ids[:at+1], ids[at+2:]...)
		vals = append(vals[:at], vals[at+1:]...)
		if at < len(vals) {
			vals[at] = t.get(ids[at], ids[at+1])
		}
		if at > 0 {
			vals[at-1] = t.get(ids[at-1], ids[at])
		}
	}
}

// joinLong keeps the symbols in a linked list and the candidate pairs in a heap: n log n, where scanning would be n².
func (t *pairTable) joinLong(ids []int32) []int32 {
	n := int32(len(ids))
	prev, next := make([]int32, n), make([]int32, n)
	h := make(pairHeap, 0, n)
	for i := range n {
		prev[i], next[i] = i-1, i+1
		if i+1 < n {
			if v := t.get(ids[i], ids[i+1]); v != noMerge {
				h = append(h, candidate{v, i})
			}
		}
	}
	h.init()
	for len(h) > 0 {
		c := h.pop()
		i := c.pos
		if ids[i] < 0 || next[i] == n || t.get(ids[i], ids[next[i]]) != c.val {
			continue // a neighbour has been joined since
		}
		gone := next[i]
		ids[i], ids[gone] = int32(uint32(c.val)), -1
		next[i] = next[gone]
		if next[i] < n {
			prev[next[i]] = i
			h.push(t.get(ids[i], ids[next[i]]), i)
		}
		if prev[i] >= 0 {
			h.push(t.get(ids[prev[i]], ids[i]), prev[i])
		}
	}
	out := ids[:0]
	for _, id := range ids {
		if id >= 0 {
			out = append(out, id)
		}
	}
	return out
}
