package token

import (
	"bytes"
	"strings"
)

// decoder is the compiled "decoder" of tokenizer.json: a rule for each token, and a rule for the start of the text.
// Both can be applied while tokens arrive.
type decoder struct {
	byteLevel bool
	replace   [][2]string // literal replacements in a token, in order
	grown     growth      // by replace
	fallback  bool        // "<0x41>" stands for the byte 0x41
	marker    string      // Metaspace: this character is dropped from the first token
	strip     string      // one character, dropped at the start of the text...
	stripMax  int         // ...at most so many times
}

// bytesOf returns the bytes that a token stands for.
func (d *decoder) bytesOf(piece string) string {
	if d.byteLevel {
		return unmapBytes(piece)
	}
	for _, r := range d.replace {
		piece = strings.ReplaceAll(piece, r[0], r[1])
	}
	if d.fallback {
		if b, ok := byteToken(piece); ok {
			return string([]byte{b})
		}
	}
	return piece
}

// Stream decodes token by token. The texts of all Push calls and the Flush, put together, are what Decode gives. Where
// Hugging Face's byte fallback turns a whole run of byte tokens into U+FFFD because one of them is broken, the Stream
// keeps the characters that were whole: it has emitted them already.
type Stream struct {
	t       *Tokenizer
	skip    bool
	begun   bool   // a token has been decoded
	strip   int    // leading characters that may still be dropped
	pending []byte // the start of a character
}

// NewStream returns a decoder for one text. skipSpecial leaves special tokens out.
func (t *Tokenizer) NewStream(skipSpecial bool) *Stream {
	return &Stream{t: t, skip: skipSpecial, strip: t.dec.stripMax}
}

// Push takes the next token and returns the text that is final now; it holds back the start of a character.
func (s *Stream) Push(id int32) string {
	e := s.t.entry(id)
	if !e.known || s.skip && e.special {
		return ""
	}
	raw := e.raw
	if !s.begun && s.t.dec.marker != "" {
		raw = strings.ReplaceAll(e.piece, s.t.dec.marker, "")
	}
	s.begun = true
	if len(s.pending) == 0 && isASCII(raw) {
		return s.trim(raw)
	}
	s.pending = append(s.pending, raw...)
	return s.take(false)
}

// Flush returns what Push held back, as U+FFFD. The Stream can decode another text afterwards.
func (s *Stream) Flush() string {
	text := s.take(true)
	s.begun, s.strip = false, s.t.dec.stripMax
	return text
}

func (s *Stream) take(final bool) string {
	text, n := lossy(s.pending, final)
	s.pending = bytes.Clone(s.pending[n:])
	return s.trim(text)
}

// trim drops the leading characters that the decoder strips from the start of a text.
func (s *Stream) trim(text string) string {
	for s.strip > 0 && text != "" {
		rest, found := strings.CutPrefix(text, s.t.dec.strip)
		if !found {
			s.strip = 0
			break
		}
		text = rest
		s.strip--
	}
	return text
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}
