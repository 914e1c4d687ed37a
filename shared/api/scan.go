package api

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"

	"meridian.internal/shared/jsonline"
)

const (
	maxDepth  = 256 // nesting of a body; deeper bodies are refused before they cost stack
	maxFields = 256 // fields of one object that is split
)

// ErrSyntax is returned when bytes are no JSON of the expected kind.
var ErrSyntax = errors.New("malformed JSON")

// Field is one member of a JSON object: the unescaped key, and the value's bytes as they were sent. Both alias the input.
type Field struct {
	Key   []byte
	Value []byte
}

// SplitObject appends the members of the object in b to dst, in order, duplicates included. It validates all of b without
// decoding it: a prompt of 64 KB costs one pass over its bytes.
func SplitObject(dst []Field, b []byte) ([]Field, error) {
	fields, _, err := splitObject(dst, b)
	return fields, err
}

// splitObject is SplitObject; ascii tells that b holds nothing else, so that it is UTF-8.
func splitObject(dst []Field, b []byte) (_ []Field, ascii bool, _ error) {
	s := scanner{b: b}
	start := len(dst)
	for more := s.enter('{'); more; more = s.more('{') {
		key, value := s.key(), s.take()
		if len(dst)-start >= maxFields {
			s.fail("more than %d fields in one object", maxFields)
		}
		dst = append(dst, Field{Key: key, Value: value})
	}
	s.end()
	return dst, s.ascii(), s.err
}

// eachElement calls f with the bytes of each element of the array in b, until f returns false. b was validated before.
func eachElement(b []byte, f func(elem []byte) bool) error {
	s := scanner{b: b}
	for more := s.enter('['); more; more = s.more('[') {
		if elem := s.take(); s.err == nil && !f(elem) {
			break
		}
	}
	return s.err
}

// scanner walks JSON and validates it as encoding/json does (RFC 8259), without building values. What is of interest is
// walked by its reader, in one pass over the bytes:
//
//	for more := s.enter('{'); more; more = s.more('{') {
//		switch key := s.key(); string(key) { // each case takes, skips or enters the value
//
// The first error stays, and ends every walk.
type scanner struct {
	b     []byte
	i     int
	depth int
	seen  uint64 // bits of the bytes of strings; what is outside of them is ASCII, or no JSON
	err   error
}

func (s *scanner) fail(format string, args ...any) {
	if s.err == nil {
		s.err = fmt.Errorf("%w at byte %d: %s", ErrSyntax, s.i, fmt.Sprintf(format, args...))
	}
}

// ascii tells that what was walked holds nothing else.
func (s *scanner) ascii() bool { return s.seen&tops == 0 }

func (s *scanner) peek() byte {
	if s.i < len(s.b) {
		return s.b[s.i]
	}
	return 0
}

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\n', '\r':
			s.i++
		default:
			return
		}
	}
}

// end wants nothing more.
func (s *scanner) end() {
	s.space()
	if s.i != len(s.b) {
		s.fail("data after the value")
	}
}

// enter walks into the object or array that opens with that character, and tells whether it has a first member.
func (s *scanner) enter(opening byte) (more bool) {
	s.space()
	switch {
	case s.peek() != opening && opening == '{':
		s.fail("want an object")
	case s.peek() != opening:
		s.fail("want an array")
	case s.depth == maxDepth:
		s.fail("nested deeper than %d", maxDepth)
	}
	if s.err != nil {
		return false
	}
	s.i++
	s.depth++
	s.space()
	if s.peek() == closing(opening) {
		s.i++
		s.depth--
		return false
	}
	return true
}

// more walks over a comma, or out of the object or array.
func (s *scanner) more(opening byte) bool {
	if s.err != nil {
		return false
	}
	s.space()
	switch s.peek() {
	case ',':
		s.i++
		return true
	case closing(opening):
		s.i++
		s.depth--
		return false
	}
	s.fail("want a comma or %q", closing(opening))
	return false
}

func closing(opening byte) byte { return opening + 2 } // in ASCII

// key walks over a key and its colon; nil after an error.
func (s *scanner) key() []byte {
	raw := s.rawKey()
	if s.err != nil {
		return nil
	}
	return unquoteKey(raw)
}

func (s *scanner) rawKey() []byte {
	s.space()
	if s.peek() != '"' {
		s.fail("want a key")
		return nil
	}
	from := s.i
	s.str()
	raw := s.b[from:s.i]
	s.space()
	if s.peek() != ':' {
		s.fail("want a colon")
		return nil
	}
	s.i++
	return raw
}

// take walks over a value and returns its bytes; nil after an error.
func (s *scanner) take() []byte {
	s.space()
	from := s.i
	s.skip()
	if s.err != nil {
		return nil
	}
	return s.b[from:s.i]
}

// null walks over a null, if there is one.
func (s *scanner) null() bool {
	s.space()
	is := bytes.HasPrefix(s.b[s.i:], []byte("null"))
	if is {
		s.i += len("null")
	}
	return is
}

// skip walks over a value.
func (s *scanner) skip() {
	s.space()
	if s.i >= len(s.b) {
		s.fail("unexpected end")
		return
	}
	switch c := s.b[s.i]; {
	case c == '"':
		s.str()
	case c == '{':
		for more := s.enter('{'); more; more = s.more('{') {
			s.rawKey()
			s.skip()
		}
	case c == '[':
		for more := s.enter('['); more; more = s.more('[') {
			s.skip()
		}
	case c == '-' || (c >= '0' && c <= '9'):
		s.number()
	case c == 't':
		s.literal("true")
	case c == 'f':
		s.literal("false")
	case c == 'n':
		s.literal("null")
	default:
		s.fail("unexpected character %q", c)
	}
}

func (s *scanner) literal(want string) {
	if !bytes.HasPrefix(s.b[s.i:], []byte(want)) {
		s.fail("want %s", want)
		return
	}
	s.i += len(want)
}

// tops are the top bits of a word of eight bytes.
const tops = 0x8080808080808080

// plain walks over the next bytes that are neither a quote nor a backslash nor a control character, as far as words of eight
// bytes show it, four at a time while there are many: a long prompt is one string.
func (s *scanner) plain() {
	rest, seen := s.b[s.i:], s.seen
	for len(rest) >= 32 {
		a, b := binary.LittleEndian.Uint64(rest), binary.LittleEndian.Uint64(rest[8:])
		c, d := binary.LittleEndian.Uint64(rest[16:]), binary.LittleEndian.Uint64(rest[24:])
		if (jsonline.Special(a)|jsonline.Special(b)|jsonline.Special(c)|jsonline.Special(d))&tops != 0 {
			break
		}
		seen |= a | b | c | d
		rest = rest[32:]
	}
	for len(rest) >= 8 {
		w := binary.LittleEndian.Uint64(rest)
		if jsonline.Special(w)&tops != 0 {
			break
		}
		seen |= w
		rest = rest[8:]
	}
	s.i, s.seen = len(s.b)-len(rest), seen
}

func (s *scanner) str() {
	s.i++
	for s.i < len(s.b) {
		s.plain()
		for word := min(s.i+8, len(s.b)); s.i < word; s.i++ { // what is not plain is in it
			c := s.b[s.i]
			s.seen |= uint64(c)
			switch {
			case c == '"':
				s.i++
				return
			case c < 0x20:
				s.fail("control character in a string")
				return
			case c == '\\':
				if !s.escape() {
					return
				}
			}
		}
	}
	s.fail("unterminated string")
}

func (s *scanner) escape() bool {
	s.i++
	switch s.peek() {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return true
	case 'u':
		for range 4 {
			s.i++
			if !isHex(s.peek()) {
				s.fail("bad \\u escape")
				return false
			}
		}
		return true
	}
	s.fail("bad escape")
	return false
}

func isHex(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

func (s *scanner) digits() bool {
	from := s.i
	for c := s.peek(); c >= '0' && c <= '9'; c = s.peek() {
		s.i++
	}
	return s.i > from
}

func (s *scanner) number() {
	if s.peek() == '-' {
		s.i++
	}
	ok := true
	if s.peek() == '0' {
		s.i++
	} else {
		ok = s.digits()
	}
	if ok && s.peek() == '.' {
		s.i++
		ok = s.digits()
	}
	if c := s.peek(); ok && (c == 'e' || c == 'E') {
		s.i++
		if c := s.peek(); c == '+' || c == '-' {
			s.i++
		}
		ok = s.digits()
	}
	if !ok {
		s.fail("bad number")
	}
}

// unquoteKey strips the quotes; an escaped key is decoded, so that no spelling hides a control field.
func unquoteKey(raw []byte) []byte {
	inner := raw[1 : len(raw)-1]
	if bytes.IndexByte(inner, '\\') < 0 {
		return inner
	}
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return inner // cannot happen: the scanner accepted it
	}
	return []byte(s)
}
