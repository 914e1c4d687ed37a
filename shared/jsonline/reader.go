// Package jsonline owns the reading and writing of JSON objects whose shape is known: records and timelines, one a line.
// It is a pull reader over a string and an appender over bytes, several times faster than reflection. It knows no schema.
package jsonline

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// ErrSyntax is returned (wrapped, with the offset) when the text is no JSON or a value is not of the wanted kind.
var ErrSyntax = errors.New("jsonline: bad JSON")

// maxDepth bounds the nesting of values: hostile input must not grow the stack.
const maxDepth = 64

// Reader pulls values out of one JSON text. After the first error everything returns zero and Err tells it. Strings share
// memory with the text.
//
//	if r.Object() {
//		for key, ok := r.Key(); ok; key, ok = r.Key() {
//			switch key { case "n": n = r.Int(); default: r.Skip() }
//		}
//	}
type Reader struct {
	s     string
	i     int
	first bool // a container was just opened: no comma before the next item
	depth int
	err   error
}

// NewReader reads s.
func NewReader(s string) *Reader { return &Reader{s: s} }

// Err is the first error.
func (r *Reader) Err() error { return r.err }

// End checks that nothing but white space follows, and returns the first error.
func (r *Reader) End() error {
	if r.peek(); r.err == nil && r.i < len(r.s) {
		r.Fail("end of the text")
	}
	return r.err
}

// Offset is where the reader stands.
func (r *Reader) Offset() int { return r.i }

// Fail records an error at the current offset, unless there was one before.
func (r *Reader) Fail(want string) {
	if r.err != nil {
		return
	}
	got := "end of the text"
	if r.i < len(r.s) {
		got = strconv.Quote(r.s[r.i:min(r.i+12, len(r.s))])
	}
	r.err = fmt.Errorf("%w at byte %d: want %s, got %s", ErrSyntax, r.i, want, got)
	r.i = len(r.s)
}

// peek skips white space and returns the next byte, 0 at the end.
func (r *Reader) peek() byte {
	for r.i < len(r.s) {
		c := r.s[r.i]
		if c > ' ' || (c != ' ' && c != '\n' && c != '\t' && c != '\r') {
			return c
		}
		r.i++
	}
	return 0
}

// Next is the byte that the next value begins with, 0 at the end.
func (r *Reader) Next() byte { return r.peek() }

// Null consumes a null and says so.
func (r *Reader) Null() bool {
	if r.peek() == 'n' && strings.HasPrefix(r.s[r.i:], "null") {
		r.i += 4
		return true
	}
	return false
}

// Object enters an object; false: null or an error.
func (r *Reader) Object() bool { return r.open('{', "an object") }

// Array enters an array; false: null or an error.
func (r *Reader) Array() bool { return r.open('[', "an array") }

func (r *Reader) open(c byte, want string) bool {
	if r.peek() != c {
		if !r.Null() {
			r.Fail(want)
		}
		return false
	}
	if r.depth++; r.depth > maxDepth {
		r.Fail(fmt.Sprintf("at most %d levels", maxDepth))
		return false
	}
	r.i++
	r.first = true
	return true
}

// more steps over the comma before the next item, or over the closing bracket: then there is none.
func (r *Reader) more(closing byte, want string) bool {
	c := r.peek()
	switch {
	case c == closing && r.err == nil:
		r.i++
		r.depth--
		r.first = false
		return false
	case r.first:
		r.first = false
		return r.err == nil
	case c == ',':
		r.i++
		return r.err == nil
	}
	r.Fail(want)
	return false
}

// Key returns the next key of the object; not ok: the object ended, or an error.
func (r *Reader) Key() (key string, ok bool) {
	if !r.more('}', "a comma or }") {
		return "", false
	}
	key = r.String()
	if r.peek() != ':' {
		r.Fail("a colon")
		return "", false
	}
	r.i++
	return key, r.err == nil
}

// Item says whether the array has another item, and stands before it.
func (r *Reader) Item() bool {
	if !r.more(']', "a comma or ]") {
		return false
	}
	if c := r.peek(); c == 0 || c == ']' {
		r.Fail("a value")
	}
	return r.err == nil
}

// String reads a string; null is "".
func (r *Reader) String() string {
	if r.peek() != '"' {
		if !r.Null() {
			r.Fail("a string")
		}
		return ""
	}
	start := r.i + 1
	text, ascii := r.s[start:], true // locals stay in registers: strings are most of what is read
	for i := range len(text) {
		switch c := text[i]; {
		case c == '"':
			r.i = start + i + 1
			if !ascii && !utf8.ValidString(text[:i]) {
				return string([]rune(text[:i])) // each bad byte becomes U+FFFD
			}
			return text[:i]
		case c == '\\':
			r.i = start + i
			return r.escaped(start)
		case c < 0x20:
			r.i = start + i
			r.Fail("no control character in a string")
			return ""
		case c >= utf8.RuneSelf:
			ascii = false
		}
	}
	r.i = len(r.s)
	r.Fail("the end of a string")
	return ""
}

// escaped reads on from the first backslash of a string that began at start.
func (r *Reader) escaped(start int) string {
	b := []byte(r.s[start:r.i])
	for r.i < len(r.s) {
		c := r.s[r.i]
		r.i++
		switch {
		case c == '"':
			return string([]rune(string(b)))
		case c < 0x20:
			r.i--
			r.Fail("no control character in a string")
			return ""
		case c != '\\':
			b = append(b, c)
		default:
			var ok bool
			if b, ok = r.escape(b); !ok {
				return ""
			}
		}
	}
	r.Fail("the end of a string")
	return ""
}

func (r *Reader) escape(b []byte) ([]byte, bool) {
	if r.i >= len(r.s) {
		r.Fail("an escape")
		return nil, false
	}
	c := r.s[r.i]
	r.i++
	switch c {
	case '"', '\\', '/':
		return append(b, c), true
	case 'b':
		return append(b, '\b'), true
	case 'f':
		return append(b, '\f'), true
	case 'n':
		return append(b, '\n'), true
	case 'r':
		return append(b, '\r'), true
	case 't':
		return append(b, '\t'), true
	case 'u':
		return r.unicode(b)
	}
	r.i--
	r.Fail("a known escape")
	return nil, false
}

func (r *Reader) unicode(b []byte) ([]byte, bool) {
	u, ok := r.hex4()
	if !ok {
		return nil, false
	}
	if !utf16.IsSurrogate(u) {
		return utf8.AppendRune(b, u), true
	}
	if strings.HasPrefix(r.s[r.i:], `\u`) {
		back := r.i
		r.i += 2
		if low, ok := r.hex4(); ok {
			if full := utf16.DecodeRune(u, low); full != utf8.RuneError {
				return utf8.AppendRune(b, full), true
			}
			r.i = back // a lone half; what follows stands for itself
		} else {
			return nil, false
		}
	}
	return utf8.AppendRune(b, utf8.RuneError), true
}

func (r *Reader) hex4() (rune, bool) {
	if r.i+4 > len(r.s) {
		r.Fail("four hex digits")
		return 0, false
	}
	var u rune
	for _, c := range []byte(r.s[r.i : r.i+4]) {
		switch {
		case c >= '0' && c <= '9':
			u = u<<4 | rune(c-'0')
		case c >= 'a' && c <= 'f':
			u = u<<4 | rune(c-'a'+10)
		case c >= 'A' && c <= 'F':
			u = u<<4 | rune(c-'A'+10)
		default:
			r.Fail("four hex digits")
			return 0, false
		}
	}
	r.i += 4
	return u, true
}

// Bool reads true or false; null is false.
func (r *Reader) Bool() bool {
	switch r.peek() {
	case 't':
		if strings.HasPrefix(r.s[r.i:], "true") {
			r.i += 4
			return true
		}
	case 'f':
		if strings.HasPrefix(r.s[r.i:], "false") {
			r.i += 5
			return false
		}
	}
	if !r.Null() {
		r.Fail("true or false")
	}
	return false
}

// Pass steps over a value by its brackets and quotes alone, several times faster than Skip: what is between them is not
// checked, and may be no JSON.
func (r *Reader) Pass() {
	c := r.peek()
	if r.err != nil || (c != '{' && c != '[') {
		r.Skip()
		return
	}
	text, depth := r.s[r.i:], 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				r.i += i + 1
				return
			}
		}
	}
	r.i = len(r.s)
	r.Fail("the end of a value")
}

// Skip steps over one value of any kind.
func (r *Reader) Skip() {
	switch c := r.peek(); c {
	case '{':
		if r.Object() {
			for _, ok := r.Key(); ok; _, ok = r.Key() {
				r.Skip()
			}
		}
	case '[':
		if r.Array() {
			for r.Item() {
				r.Skip()
			}
		}
	case '"':
		_ = r.String()
	case 't', 'f', 'n':
		r.Bool()
	default:
		r.skipNumber()
	}
}

// Raw steps over one value and returns its text.
func (r *Reader) Raw() string {
	r.peek()
	start := r.i
	r.Skip()
	if r.err != nil {
		return ""
	}
	return r.s[start:r.i]
}
