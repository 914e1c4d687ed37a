package token

import (
	"bytes"
	"strings"
)

// Tokenizer is a parsed tokenizer.json. It does not change after Parse and is safe for concurrent use.
type Tokenizer struct {
	entries   []entry // by id
	ids       map[string]int32
	added     addedSet // matched in the text as it came
	addedNorm addedSet // matched in the normalized text
	normalize func(string) string
	stages    []stage
	model     *model
	prefix    []int32 // ids that the post-processor puts before the text
	suffix    []int32 // and after it
	dec       decoder
}

// entry is what is known of one id.
type entry struct {
	piece   string // as tokenizer.json spells it
	raw     string // the bytes it stands for
	known   bool   // false for an id that the file leaves out
	special bool
}

// Encode returns the ids of text. addSpecial adds the tokens of the post-processor (usually the begin-of-text token).
// Special tokens that stand in text are recognised, as Hugging Face's library does; a caller that must not allow this
// has to check the text first. Bytes that are no UTF-8 count as U+FFFD.
func (t *Tokenizer) Encode(text string, addSpecial bool) []int32 {
	text = validUTF8(text)
	out := make([]int32, 0, len(text)/3+len(t.prefix)+len(t.suffix))
	if addSpecial {
		out = append(out, t.prefix...)
	}
	t.added.split(text, func(part string, at int, id int32) {
		if id >= 0 {
			out = append(out, id)
			return
		}
		out = t.appendPart(out, part, at == 0)
	})
	if addSpecial {
		out = append(out, t.suffix...)
	}
	return out
}

// appendPart encodes a stretch of text without unnormalized added tokens; first says that the text begins with it.
func (t *Tokenizer) appendPart(out []int32, part string, first bool) []int32 {
	if t.normalize != nil {
		part = t.normalize(part)
	}
	t.addedNorm.split(part, func(part string, at int, id int32) {
		if id >= 0 {
			out = append(out, id)
			return
		}
		runStages(t.stages, part, first && at == 0, func(piece string) {
			out = t.model.encode(out, piece)
		})
	})
	return out
}

// Decode returns the text of ids; skipSpecial leaves special tokens out. Ids that the vocabulary does not hold are
// left out too. Bytes that form no UTF-8 become U+FFFD, one for each maximal broken part.
func (t *Tokenizer) Decode(ids []int32, skipSpecial bool) string {
	s := t.NewStream(skipSpecial)
	var b strings.Builder
	for _, id := range ids {
		b.WriteString(s.Push(id))
	}
	b.WriteString(s.Flush())
	return b.String()
}

// VocabSize returns the highest id plus one, added tokens included. A model's own vocabulary may be padded beyond it.
func (t *Tokenizer) VocabSize() int { return len(t.entries) }

// TokenID returns the id of the token spelled s in tokenizer.json, added tokens included.
func (t *Tokenizer) TokenID(s string) (int32, bool) {
	id, ok := t.ids[s]
	return id, ok
}

// Token returns the token as tokenizer.json spells it (a byte-level " the" is "Ġthe"): the inverse of TokenID.
func (t *Tokenizer) Token(id int32) (string, bool) {
	e := t.entry(id)
	return e.piece, e.known
}

// TokenBytes returns the bytes that the token adds to a text, which need not be whole characters; nil for an unknown
// id. The caller owns the slice.
func (t *Tokenizer) TokenBytes(id int32) []byte {
	e := t.entry(id)
	if !e.known {
		return nil
	}
	return bytes.Clone([]byte(e.raw))
}

// IsSpecial reports whether the id is a special token, one that skipSpecial leaves out.
func (t *Tokenizer) IsSpecial(id int32) bool { return t.entry(id).special }

func (t *Tokenizer) entry(id int32) entry {
	if id < 0 || int(id) >= len(t.entries) {
		return entry{}
	}
	return t.entries[id]
}
