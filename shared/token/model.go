package token

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// model is byte-pair encoding: a piece of text becomes symbols, and the pair of neighbours that comes first in the list
// of merges is joined, again and again.
type model struct {
	byteLevel    bool             // the first symbols are bytes, else characters
	bytes        [256]int32       // ids of single bytes: of the byte-level alphabet, else of the byte fallback; -1 is none
	vocab        map[string]int32 // by spelling
	pairs        pairTable
	unk          int32 // for a symbol that is not in the vocabulary; -1: it is dropped
	fuseUnk      bool  // neighbouring unknowns become one
	fallback     bool  // an unknown character becomes its bytes
	ignoreMerges bool  // a piece that is a token as it stands is not merged
	words        bool  // no token reaches over the start of a word, so that words can be encoded one by one
	cache        *cache
}

// modelJSON is "model" of tokenizer.json.
type modelJSON struct {
	Type         string           `json:"type"`
	Dropout      *float64         `json:"dropout"`
	Unk          *string          `json:"unk_token"`
	Prefix       *string          `json:"continuing_subword_prefix"`
	Suffix       *string          `json:"end_of_word_suffix"`
	FuseUnk      bool             `json:"fuse_unk"`
	ByteFallback bool             `json:"byte_fallback"`
	IgnoreMerges bool             `json:"ignore_merges"`
	Vocab        map[string]int32 `json:"vocab"`
	Merges       []mergePair      `json:"merges"`
}

// newModel checks what tokenizer.json says and indexes it. byteLevel is known from the pre-tokenizer.
func newModel(m modelJSON, byteLevel bool) (*model, error) {
	switch {
	case m.Type != "BPE" && m.Type != "":
		return nil, unsupported("model.type", m.Type, "BPE")
	case m.Dropout != nil && *m.Dropout != 0:
		return nil, unsupported("model.dropout", *m.Dropout, "null")
	case m.Prefix != nil && *m.Prefix != "":
		return nil, unsupported("model.continuing_subword_prefix", *m.Prefix, "none")
	case m.Suffix != nil && *m.Suffix != "":
		return nil, unsupported("model.end_of_word_suffix", *m.Suffix, "none")
	case len(m.Vocab) == 0:
		return nil, fmt.Errorf("model.vocab is empty or not an object")
	}
	out := &model{
		byteLevel: byteLevel, vocab: m.Vocab, unk: -1, fuseUnk: m.FuseUnk,
		fallback: m.ByteFallback, ignoreMerges: m.IgnoreMerges, cache: newCache(),
	}
	if m.Unk != nil {
		id, ok := m.Vocab[*m.Unk]
		if !ok {
			return nil, fmt.Errorf("model.unk_token %q is not in model.vocab", *m.Unk)
		}
		out.unk = id
	}
	if err := out.indexBytes(); err != nil {
		return nil, err
	}
	if err := out.indexMerges(m.Merges); err != nil {
		return nil, err
	}
	_, hasMarker := m.Vocab[wordMarker]
	out.words = !byteLevel && hasMarker && !m.IgnoreMerges && !slices.ContainsFunc(m.Merges, reachesOver)
	return out, nil
}

// wordMarker begins a word in vocabularies of SentencePiece.
const wordMarker = "▁"

// wordEnd returns where the word that s begins with ends: before the next marker that follows another character.
func wordEnd(s string) int {
	n := len(s) - len(strings.TrimLeft(s, wordMarker))
	if i := strings.Index(s[n:], wordMarker); i >= 0 && n+i > 0 {
		return n + i
	}
	return len(s)
}

// reachesOver reports whether a merge joins the end of a word with the start of the next.
func reachesOver(p mergePair) bool { return wordEnd(p[0]+p[1]) < len(p[0])+len(p[1]) }

func (m *model) indexBytes() error {
	for i := range m.bytes {
		name := byteTokenName(byte(i))
		if m.byteLevel {
			name = string(mapByte(byte(i)))
		}
		id, ok := m.vocab[name]
		if !ok {
			id = -1
		}
		if id < 0 && m.byteLevel && m.fallback {
			return fmt.Errorf("model.vocab lacks the byte %q: byte_fallback with an incomplete byte-level alphabet is not supported", name)
		}
		m.bytes[i] = id
	}
	return nil
}

func (m *model) indexMerges(merges []mergePair) error {
	m.pairs = newPairTable(len(merges))
	for rank, p := range merges {
		left, ok := m.vocab[p[0]]
		if !ok {
			return fmt.Errorf("model.merges[%d]: %q is not in model.vocab", rank, p[0])
		}
		right, ok := m.vocab[p[1]]
		if !ok {
			return fmt.Errorf("model.merges[%d]: %q is not in model.vocab", rank, p[1])
		}
		joined, ok := m.vocab[p[0]+p[1]]
		if !ok {
			return fmt.Errorf("model.merges[%d]: the joined %q is not in model.vocab", rank, p[0]+p[1])
		}
		if p[0] == "" || p[1] == "" {
			return fmt.Errorf("model.merges[%d]: one side is empty", rank)
		}
		m.pairs.put(left, right, merge(rank, joined))
	}
	return nil
}

// encode appends the ids of a piece. A text without pre-tokenizer is one piece; where no merge can join two words, it is
// cut into words, which gives the same ids and can use the cache.
func (m *model) encode(dst []int32, piece string) []int32 {
	for m.words && len(piece) > 0 {
		n := wordEnd(piece)
		if n == len(piece) {
			break
		}
		dst, piece = m.encodeWord(dst, piece[:n]), piece[n:]
	}
	return m.encodeWord(dst, piece)
}

func (m *model) encodeWord(dst []int32, piece string) []int32 {
	if len(piece) > maxCached {
		return append(dst, m.tokenize(piece)...)
	}
	ids, ok := m.cache.get(piece)
	if !ok {
		ids = m.tokenize(piece)
		m.cache.put(piece, ids)
	}
	return append(dst, ids...)
}

func (m *model) tokenize(piece string) []int32 {
	if m.ignoreMerges {
		spelled := piece
		if m.byteLevel {
			spelled = mapBytes(piece)
		}
		if id, ok := m.vocab[spelled]; ok {
			return []int32{id}
		}
	}
	return m.pairs.join(m.symbols(piece))
}

// symbols splits a piece into the ids that merging begins with.
func (m *model) symbols(piece string) []int32 {
	out := make([]int32, 0, len(piece))
	fused := false // the last symbol is an unknown that the next unknown joins
	for i := 0; i < len(piece); {
		n := 1
		if !m.byteLevel {
			_, n = utf8.DecodeRuneInString(piece[i:])
		}
		var known bool
		out, known = m.appendSymbol(out, piece[i:i+n])
		if !known && m.unk >= 0 {
			if !fused || !m.fuseUnk {
				out = append(out, m.unk)
			}
			fused = true
		} else {
			fused = false
		}
		i += n
	}
	return out
}

// appendSymbol appends the id of one byte or character, or of its bytes; false when there is none.
func (m *model) appendSymbol(out []int32, s string) ([]int32, bool) {
	if m.byteLevel {
		if id := m.bytes[s[0]]; id >= 0 {
			return append(out, id), true
		}
		return out, false
	}
	if id, ok := m.vocab[s]; ok {
		return append(out, id), true
	}
	if !m.fallback {
		return out, false
	}
	for i := range len(s) {
		if m.bytes[s[i]] < 0 {
			return out, false
		}
	}
	for i := range len(s) {
		out = append(out, m.bytes[s[i]])
	}
	return out, true
}
