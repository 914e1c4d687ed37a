//go:build cuda

package cuda

import (
	"math"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// Places in the header of a step's description, as in kernels/common.cuh.
const (
	hRows = iota
	hWanted
	hEntries
	hRowsAt
	hWantedAt
	hEntriesAt
	hTilesAt
	hResults // address of the results: low word, then high
	hResultsHigh
	hTables // words of the block tables of one group of layers
	hSize   = 16
)

// minTiled is the least number of query tokens of an entry that goes into tiles; fewer go the way of decode.
const minTiled = 16

// description is what the card must know of one step. The launcher owns it and uses it again.
type description struct {
	words                 []int32
	rows, wanted, tiles   int
	untiled, longest      int // rows that are not in tiles, and the most positions that one of these sees
	assigns, assignAt     int
	copies                []copies // by group of layers
	wantedRows, tileWords []int32
	logprobs              bool
	decode                bool // each entry has one row, whose logits are wanted
}

// describe writes the batch down; slots are what the assigned sequences ask for, tileRows the query tokens of a tile of
// the prefill kernel, 0 if there is none.
func (d *description) describe(b *backend.Batch, slots []infer.Sampling, windows []backend.Window, blockTokens, tileRows int) {
	*d = description{words: append(d.words[:0], make([]int32, hSize)...), wantedRows: d.wantedRows[:0], tileWords: d.tileWords[:0], copies: d.copies[:0], decode: true}
	tableAt := d.addTables(b, windows, blockTokens)
	d.words[hRowsAt] = int32(len(d.words))
	for i := range b.Entries {
		d.addRows(&b.Entries[i], tableAt[i], tileRows)
	}
	d.words[hRows], d.words[hWanted], d.words[hEntries] = int32(d.rows), int32(d.wanted), int32(len(b.Entries))
	d.words[hWantedAt] = int32(len(d.words))
	d.words = append(d.words, d.wantedRows...)
	d.words[hTilesAt] = int32(len(d.words))
	d.words = append(d.words, d.tileWords...)
	d.tiles = len(d.tileWords) / 2
	d.addEntries(b, slots)
	d.addAssigns(b)
	for group := range 1 + len(windows) {
		c := copies{at: len(d.words)}
		for _, block := range b.Copies {
			if block.Group == group {
				d.words, c.n = append(d.words, block.From, block.To), c.n+1
			}
		}
		d.copies = append(d.copies, c)
	}
}

// copies are pairs of blocks of one group of layers, n of them, at a place in the description.
type copies struct{ at, n int }

// addTables writes the block tables of all entries, for each group of layers one after the other and of the same length. It gives
// where those of group 0 are.
func (d *description) addTables(b *backend.Batch, windows []backend.Window, blockTokens int) (at []int32) {
	at = make([]int32, len(b.Entries))
	for i := range b.Entries {
		e := &b.Entries[i]
		at[i] = int32(len(d.words))
		d.words = append(d.words, e.Blocks[:tableBlocks(e, blockTokens)]...)
	}
	d.words[hTables] = int32(len(d.words) - hSize)
	for w := range windows {
		for i := range b.Entries {
			e := &b.Entries[i]
			// What no query sees may have been given back, and may change: 0 stands for it. Kernels may read there, and let it not count.
			unseen, n := max(e.KVLen-windows[w].Tokens+1, 0)/blockTokens, tableBlocks(e, blockTokens)
			d.words = append(d.words, make([]int32, unseen)...)
			d.words = append(d.words, e.Windows[w][unseen:n]...)
		}
	}
	return at
}

// tableBlocks is how many blocks of an entry's table a step may touch.
func tableBlocks(e *backend.Entry, blockTokens int) int {
	return (e.KVLen + e.Queries() + blockTokens - 1) / blockTokens
}

func (d *description) addRows(e *backend.Entry, table int32, tileRows int) {
	q, wanted, flag := e.Queries(), e.Logits, int32(0)
	if q != 1 || len(wanted) != 1 {
		d.decode = false
	}
	if tileRows > 0 && q >= minTiled {
		flag = 1
		for at := 0; at < q; at += tileRows {
			d.tileWords = append(d.tileWords, int32(d.rows+at), int32(min(tileRows, q-at)))
		}
	} else {
		d.untiled += q
		d.longest = max(d.longest, e.KVLen+q)
	}
	for j := range q {
		token := int32(-1)
		if e.Tokens != nil {
			token = e.Tokens[j]
		}
		d.words = append(d.words, token, int32(e.KVLen+j), int32(e.Slot), table, flag)
		if len(wanted) > 0 && wanted[0] == j {
			d.wantedRows = append(d.wantedRows, int32(d.rows+j))
			wanted = wanted[1:]
		}
	}
	d.rows += q
	d.wanted += len(e.Logits)
}

const entryWords = 18

// addEntries writes what the sampler must know, and behind it masks and biases.
func (d *description) addEntries(b *backend.Batch, slots []infer.Sampling) {
	at := len(d.words)
	d.words[hEntriesAt] = int32(at)
	d.words = append(d.words, make([]int32, len(b.Entries)*entryWords)...)
	wanted := 0
	for i := range b.Entries {
		e, s := &b.Entries[i], &slots[b.Entries[i].Slot]
		flags, mask, bias := int32(0), int32(-1), int32(len(d.words))
		if s.Penalized() {
			flags |= 1
		}
		if s.Logprobs || s.TopLogprobs > 0 {
			flags |= 2
			d.logprobs = d.logprobs || len(e.Logits) > 0
		}
		for t, v := range s.LogitBias {
			d.words = append(d.words, t, bits(v))
		}
		if e.Mask != nil {
			mask = int32(len(d.words))
			for _, w := range e.Mask {
				d.words = append(d.words, int32(w))
			}
		}
		copy(d.words[at+i*entryWords:], []int32{
			int32(e.Slot), int32(wanted), int32(len(e.Logits)), bits(s.Temperature), bits(s.TopP), bits(s.MinP),
			bits(s.RepetitionPenalty), bits(s.PresencePenalty), bits(s.FrequencyPenalty), int32(min(s.TopK, math.MaxInt32)), flags,
			int32(s.TopLogprobs), bias, int32(len(s.LogitBias)), mask, int32(len(e.Mask)), int32(uint32(s.Seed)), int32(s.Seed >> 32),
		})
		wanted += len(e.Logits)
	}
}

func bits(f float32) int32 { return int32(math.Float32bits(f)) }

// addAssigns writes the slots that begin a sequence, and the history of those that are penalized.
func (d *description) addAssigns(b *backend.Batch) {
	d.assigns, d.assignAt = len(b.Assign), len(d.words)
	d.words = append(d.words, make([]int32, 4*len(b.Assign))...)
	for i, a := range b.Assign {
		history := int32(-1)
		if a.Sampling.Penalized() {
			history = int32(len(d.words))
			d.words = append(d.words, a.History...)
		}
		copy(d.words[d.assignAt+4*i:], []int32{int32(a.Slot), history, int32(len(a.History)), int32(a.PromptLen)})
	}
}
