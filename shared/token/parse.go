package token

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// file is tokenizer.json. "truncation" and "padding" are left alone: both concern batches, and the limit on a prompt is
// the server's.
type file struct {
	Added         []addedToken    `json:"added_tokens"`
	Normalizer    json.RawMessage `json:"normalizer"`
	PreTokenizer  json.RawMessage `json:"pre_tokenizer"`
	PostProcessor json.RawMessage `json:"post_processor"`
	Decoder       json.RawMessage `json:"decoder"`
	Model         modelJSON       `json:"model"`
}

// Parse reads a tokenizer.json. Anything in it that this package does not implement is an error that names the field
// and its value. The file may be hostile: what is allocated is bounded by its length.
func Parse(tokenizerJSON []byte) (*Tokenizer, error) {
	var f file
	if err := json.Unmarshal(tokenizerJSON, &f); err != nil {
		return nil, fmt.Errorf("token: parse tokenizer.json: %w", err)
	}
	t, err := build(f)
	if err != nil {
		return nil, fmt.Errorf("token: tokenizer.json: %w", err)
	}
	return t, nil
}

func build(f file) (*Tokenizer, error) {
	t := &Tokenizer{}
	var err error
	if t.normalize, err = newNormalizer(f.Normalizer, "normalizer", 0, new(growth)); err != nil {
		return nil, err
	}
	var pre preTokenizer
	if err = pre.add(f.PreTokenizer, "pre_tokenizer", 0); err != nil {
		return nil, err
	}
	t.stages = pre.stages
	if t.model, err = newModel(f.Model, pre.byteLevel); err != nil {
		return nil, err
	}
	if err = t.dec.add(f.Decoder, "decoder"); err != nil {
		return nil, err
	}
	if err = t.index(f.Model.Vocab, f.Added); err != nil {
		return nil, err
	}
	return t, t.addPostProcessor(f.PostProcessor, "post_processor", 0)
}

// maxGap is how many ids beyond four times the number of tokens a vocabulary may reach: the table of ids has room for
// the highest one.
const maxGap = 1 << 16

// index builds the tables by id and by spelling, and the sets of added tokens.
func (t *Tokenizer) index(vocab map[string]int32, added []addedToken) error {
	limit := int64(4*(len(vocab)+len(added)) + maxGap)
	t.ids = make(map[string]int32, len(vocab)+len(added))
	for piece, id := range vocab {
		if err := t.addEntry(piece, id, limit); err != nil {
			return fmt.Errorf("model.vocab: %w", err)
		}
	}
	var plain, normalized []addedToken
	for i, tok := range added {
		if known, ok := t.ids[tok.Content]; ok && known != tok.ID {
			return fmt.Errorf("added_tokens[%d]: %q has id %d here and %d before", i, tok.Content, tok.ID, known)
		} else if !ok {
			if err := t.addEntry(tok.Content, tok.ID, limit); err != nil {
				return fmt.Errorf("added_tokens[%d]: %w", i, err)
			}
		}
		t.entries[tok.ID].special = tok.Special
		if tok.Normalized {
			normalized = append(normalized, tok)
		} else {
			plain = append(plain, tok)
		}
	}
	t.added = newAddedSet(plain, func(s string) string { return s })
	t.addedNorm = newAddedSet(normalized, func(s string) string {
		if t.normalize == nil {
			return s
		}
		return t.normalize(s)
	})
	return nil
}

func (t *Tokenizer) addEntry(piece string, id int32, limit int64) error {
	if id < 0 || int64(id) >= limit {
		return fmt.Errorf("id %d of %q is outside 0..%d", id, piece, limit-1)
	}
	if n := int(id) + 1 - len(t.entries); n > 0 {
		t.entries = append(t.entries, make([]entry, n)...)
	}
	if t.entries[id].known {
		return fmt.Errorf("id %d belongs to %q and to %q", id, t.entries[id].piece, piece)
	}
	t.entries[id] = entry{piece: piece, raw: t.dec.bytesOf(piece), known: true}
	t.ids[piece] = id
	return nil
}

// unsupported is the error for a value that another implementation may know.
func unsupported(field string, got any, want string) error {
	return fmt.Errorf("%s: %#v is not supported; want %s", field, got, want)
}

func isNull(raw json.RawMessage) bool {
	raw = bytes.TrimSpace(raw)
	return len(raw) == 0 || string(raw) == "null"
}
