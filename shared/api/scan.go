package api

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
)

const (
	maxDepth  = 256 // nesting of a body; deeper bodies are refused before they cost stack
	maxFields = 256 // fields of one object that is split
)

// ErrSyntax is returned when bytes are no JSON of the expected kind.
var ErrSyntax = errors.New("api: malformed JSON")

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
	s.space()
	if s.peek() != '{' {
		return dst, false, s.fail("want an object")
	}
	start := len(dst)
	err := s.members(1, func(key, value []byte) error {
		if len(dst)-start >= maxFields {
			return s.fail("more than %d fields in one object", maxFields)
		}
		dst = append(dst, Field{Key: key, Value: value})
		return nil
	})
	if err == nil {
		err = s.end()
	}
	return dst, s.seen&tops == 0, err
}

// eachElement calls f with the bytes of each element of the array in b, until f returns false. b was validated before.
func eachElement(b []byte, f func(elem []byte) bool) error {
	s := scanner{b: b}
	s.space()
	if s.peek() != '[' {
		return s.fail("want an array")
	}
	return s.elements(1, f)
}

// scanner walks JSON and validates it as encoding/json does (RFC 8259), without building values.
type scanner struct {
	b    []byte
	i    int
	seen uint64 // bits of the bytes of strings; what is outside of them is ASCII, or no JSON
}

func (s *scanner) fail(format string, args ...any) error {
	return fmt.Errorf("%w at byte %d: %s", ErrSyntax, s.i, fmt.Sprintf(format, args...))
}

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

func (s *scanner) end() error {
	s.space()
	if s.i != len(s.b) {
		return s.fail("data after the value")
	}
	return nil
}

func (s *scanner) value(depth int) error {
	if depth > maxDepth {
		return s.fail("nested deeper than %d", maxDepth)
	}
	if s.i >= len(s.b) {
		return s.fail("unexpected end")
	}
	switch c := s.b[s.i]; {
	case c == '"':
		return s.str()
	case c == '{':
		return s.members(depth+1, nil)
	case c == '[':
		return s.elements(depth+1, nil)
	case c == '-' || (c >= '0' && c <= '9'):
		return s.number()
	case c == 't':
		return s.literal("true")
	case c == 'f':
		return s.literal("false")
	case c == 'n':
		return s.literal("null")
	default:
		return s.fail("unexpected character %q", c)
	}
}

func (s *scanner) literal(want string) error {
	if !bytes.HasPrefix(s.b[s.i:], []byte(want)) {
		return s.fail("want %s", want)
	}
	s.i += len(want)
	return nil
}

// members walks the object at s.i; f may be nil.
func (s *scanner) members(depth int, f func(key, value []byte) error) error {
	s.i++
	s.space()
	if s.peek() == '}' {
		s.i++
		return nil
	}
	for {
		s.space()
		if s.peek() != '"' {
			return s.fail("want a key")
		}
		k := s.i
		if err := s.str(); err != nil {
			return err
		}
		key := s.b[k:s.i]
		s.space()
		if s.peek() != ':' {
			return s.fail("want a colon")
		}
		s.i++
		s.space()
		v := s.i
		if err := s.value(depth); err != nil {
			return err
		}
		if f != nil {
			if err := f(unquoteKey(key), s.b[v:s.i]); err != nil {
				return err
			}
		}
		more, err := s.next('}')
		if !more {
			return err
		}
	}
}

// elements walks the array at s.i; f may be nil.
func (s *scanner) elements(depth int, f func(elem []byte) bool) error {
	s.i++
	s.space()
	if s.peek() == ']' {
		s.i++
		return nil
	}
	for {
		s.space()
		v := s.i
		if err := s.value(depth); err != nil {
			return err
		}
		if f != nil && !f(s.b[v:s.i]) {
			return nil
		}
		more, err := s.next(']')
		if !more {
			return err
		}
	}
}

// next consumes a comma (more) or the closing character.
func (s *scanner) next(closing byte) (more bool, err error) {
	s.space()
	switch s.peek() {
	case ',':
		s.i++
		return true, nil
	case closing:
		s.i++
		return false, nil
	}
	return false, s.fail("want a comma or %q", closing)
}

// Words of eight equal bytes.
const ones, tops = 0x0101010101010101, 0x8080808080808080

// special has top bits where a word may have a quote, a backslash or a control character: none when it has none. A byte below c
// leaves its top bit in (w - c·ones) & ^w, and a byte of 0 is below 1; what is XORed here leaves the top bits of w as they are.
func special(w uint64) uint64 {
	quote, slash := w^(ones*'"'), w^(ones*'\\')
	return ((quote - ones) | (slash - ones) | (w - ones*0x20)) &^ w
}

// plain walks over the next bytes that are neither a quote nor a backslash nor a control character, as far as words of eight
// bytes show it, four at a time while there are many: a long prompt is one string.
func (s *scanner) plain() {
	rest, seen := s.b[s.i:], s.seen
	for len(rest) >= 32 {
		a, b := binary.LittleEndian.Uint64(rest), binary.LittleEndian.Uint64(rest[8:])
		c, d := binary.LittleEndian.Uint64(rest[16:]), binary.LittleEndian.Uint64(rest[24:])
		if (special(a)|special(b)|special(c)|special(d))&tops != 0 {
			break
		}
		seen |= a | b | c | d
		rest = rest[32:]
	}
	for len(rest) >= 8 {
		w := binary.LittleEndian.Uint64(rest)
		if special(w)&tops != 0 {
			break
		}
		seen |= w
		rest = rest[8:]
	}
	s.i, s.seen = len(s.b)-len(rest), seen
}

func (s *scanner) str() error {
	s.i++
	for s.i < len(s.b) {
		s.plain()
		for word := min(s.i+8, len(s.b)); s.i < word; s.i++ { // what is not plain is in it
			c := s.b[s.i]
			s.seen |= uint64(c)
			switch {
			case c == '"':
				s.i++
				return nil
			case c < 0x20:
				return s.fail("control character in a string")
			case c == '\\':
				if err := s.escape(); err != nil {
					return err
				}
			}
		}
	}
	return s.fail("unterminated string")
}

func (s *scanner) escape() error {
	s.i++
	switch s.peek() {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return nil
	case 'u':
		for range 4 {
			s.i++
			if !isHex(s.peek()) {
				return s.fail("bad \\u escape")
			}
		}
		return nil
	}
	return s.fail("bad escape")
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

func (s *scanner) number() error {
	if s.peek() == '-' {
		s.i++
	}
	if s.peek() == '0' {
		s.i++
	} else if !s.digits() {
		return s.fail("bad number")
	}
	if s.peek() == '.' {
		s.i++
		if !s.digits() {
			return s.fail("bad number")
		}
	}
	if c := s.peek(); c == 'e' || c == 'E' {
		s.i++
		if c := s.peek(); c == '+' || c == '-' {
			s.i++
		}
		if !s.digits() {
			return s.fail("bad number")
		}
	}
	return nil
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
