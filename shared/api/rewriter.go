package api

import (
	"bytes"
	"unicode/utf8"
)

// Rewriter rewrites the chunks of one stream, as RewriteChunk does. The chunks of a stream differ in their text and token
// ids only, but for the first and the last: it remembers the last chunk around them, and where the next has the same
// bytes there, it looks at nothing else. One goroutine uses it; the zero value with its fields set is ready.
type Rewriter struct {
	Chat bool
	Rewrite

	learned        bool
	hasIDs         bool
	pre, mid, post []byte // of a chunk: before the text, from it to the ids, behind them
	outPre         []byte // of the rewritten chunk
	outPost        []byte
}

// Chunk reads one chunk into c and appends its rewritten form to dst.
func (w *Rewriter) Chunk(c *Chunk, dst, data []byte) ([]byte, error) {
	if text, ids, ok := w.match(data); ok {
		*c = Chunk{Choices: 1, Text: text, TokenIDs: ids}
		return append(append(append(dst, w.outPre...), text...), w.outPost...), nil
	}
	start := len(dst)
	*c = Chunk{}
	dst, err := walkChunk(c, dst, data, w.Chat, &w.Rewrite)
	if err == nil {
		w.learn(c, data, dst[start:], start)
	}
	return dst, err
}

// match tells whether data is the remembered chunk with another text and other ids.
func (w *Rewriter) match(data []byte) (text, ids []byte, ok bool) {
	if !w.learned || !bytes.HasPrefix(data, w.pre) {
		return nil, nil, false
	}
	rest := data[len(w.pre):]
	n := plainString(rest)
	if n < 0 || !bytes.HasPrefix(rest[n:], w.mid) {
		return nil, nil, false
	}
	text, rest = rest[:n], rest[n+len(w.mid):]
	if w.hasIDs {
		n := idArray(rest)
		if n < 0 {
			return nil, nil, false
		}
		ids, rest = rest[:n], rest[n:]
	}
	return text, ids, bytes.Equal(rest, w.post)
}

// plainString is the length of a JSON string's inside that ends before a quote; -1: it holds an escape, is not UTF-8, or is none.
func plainString(b []byte) int {
	ascii := true
	for i, c := range b {
		switch {
		case c >= utf8.RuneSelf:
			ascii = false
		case c == '"' && !ascii && !utf8.Valid(b[:i]):
			return -1
		case c == '"':
			return i
		case c == '\\' || c < 0x20:
			return -1
		}
	}
	return -1
}

// idArray is the length of an array of numbers without spaces at the start of b; -1: there is none.
func idArray(b []byte) int {
	if len(b) < 3 || b[0] != '[' {
		return -1
	}
	digits := 0
	for i, c := range b[1:] {
		switch {
		case c >= '0' && c <= '9':
			if digits == 1 && b[i] == '0' {
				return -1 // 01 is no number
			}
			digits++
		case digits > 0 && c == ',':
			digits = 0
		case digits > 0 && c == ']':
			return i + 2
		default:
			return -1
		}
	}
	return -1
}

// learn remembers a chunk that is an ordinary one: a text, perhaps ids behind it, nothing else.
func (w *Rewriter) learn(c *Chunk, data, out []byte, start int) {
	w.learned = false
	if c.Choices != 1 || c.Text == nil || c.Finish != "" || c.StopReason != nil || c.Logprobs != nil || c.Usage != nil || c.Error != nil || c.Delta != nil {
		return
	}
	from := offset(data, c.Text)
	to, ids, after := from+len(c.Text), len(data), len(data)
	if w.hasIDs = c.TokenIDs != nil; w.hasIDs {
		ids = offset(data, c.TokenIDs)
		after = ids + len(c.TokenIDs)
	}
	at := c.out - start
	if ids < to || at < 0 || at+len(c.Text) > len(out) {
		return
	}
	w.learned = true
	w.pre = append(w.pre[:0], data[:from]...)
	w.mid = append(w.mid[:0], data[to:ids]...)
	w.post = append(w.post[:0], data[after:]...)
	w.outPre = append(w.outPre[:0], out[:at]...)
	w.outPost = append(w.outPost[:0], out[at+len(c.Text):]...)
}
