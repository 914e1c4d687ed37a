package jsonline

import (
	"math"
	"strconv"
	"unicode/utf8"
)

// Writer appends JSON to B. Commas are put where they belong; keys must need no escape. Its output equals that of
// encoding/json without HTML escaping.
type Writer struct{ B []byte }

// sep puts the comma before an item.
func (w *Writer) sep() {
	if n := len(w.B); n > 0 {
		if c := w.B[n-1]; c != '{' && c != '[' && c != ':' && c != '\n' {
			w.B = append(w.B, ',')
		}
	}
}

// Key writes a key and its colon.
func (w *Writer) Key(k string) {
	w.sep()
	b := append(w.B, '"') // a local stays in registers
	b = append(b, k...)
	w.B = append(b, '"', ':')
}

// Open begins an object or array: '{' or '['.
func (w *Writer) Open(c byte) {
	w.sep()
	w.B = append(w.B, c)
}

// OpenKey begins an object or array under a key.
func (w *Writer) OpenKey(k string, c byte) {
	w.Key(k)
	w.B = append(w.B, c)
}

// Close ends it: '}' or ']'.
func (w *Writer) Close(c byte) { w.B = append(w.B, c) }

// Str writes a string under a key.
func (w *Writer) Str(k, v string) {
	w.Key(k)
	w.B = AppendString(w.B, v)
}

// OptStr writes a string unless it is empty.
func (w *Writer) OptStr(k, v string) {
	if v != "" {
		w.Str(k, v)
	}
}

// Int writes an integer under a key.
func (w *Writer) Int(k string, v int64) {
	w.Key(k)
	w.B = strconv.AppendInt(w.B, v, 10)
}

// OptInt writes an integer unless it is 0.
func (w *Writer) OptInt(k string, v int64) {
	if v != 0 {
		w.Int(k, v)
	}
}

// PtrInt writes an integer unless it is nil.
func (w *Writer) PtrInt(k string, v *int64) {
	if v != nil {
		w.Int(k, *v)
	}
}

// NullInt writes an integer, or null.
func (w *Writer) NullInt(k string, v *int64) {
	if v != nil {
		w.Int(k, *v)
		return
	}
	w.Null(k)
}

// Null writes null under a key.
func (w *Writer) Null(k string) {
	w.Key(k)
	w.B = append(w.B, "null"...)
}

// Bool writes a truth value under a key.
func (w *Writer) Bool(k string, v bool) {
	w.Key(k)
	w.B = strconv.AppendBool(w.B, v)
}

// Float writes a number under a key; what JSON cannot say (NaN, infinity) becomes null.
func (w *Writer) Float(k string, v float64) {
	w.Key(k)
	w.B = AppendFloat(w.B, v)
}

// Raw writes JSON text under a key.
func (w *Writer) Raw(k, v string) {
	w.Key(k)
	w.B = append(w.B, v...)
}

// ItemInt writes an integer as an item of an array.
func (w *Writer) ItemInt(v int64) {
	w.sep()
	w.B = strconv.AppendInt(w.B, v, 10)
}

// ItemPtr writes an integer or null as an item of an array.
func (w *Writer) ItemPtr(v *int64) {
	if v == nil {
		w.sep()
		w.B = append(w.B, "null"...)
		return
	}
	w.ItemInt(*v)
}

// ItemFloat writes a number as an item of an array; what JSON cannot say becomes null.
func (w *Writer) ItemFloat(v float64) {
	w.sep()
	w.B = AppendFloat(w.B, v)
}

// ItemStr writes a string as an item of an array.
func (w *Writer) ItemStr(v string) {
	w.sep()
	w.B = AppendString(w.B, v)
}

// AppendFloat appends v as encoding/json does.
func AppendFloat(b []byte, v float64) []byte {
	if math.IsNaN(v) || math.IsInf(v, 0) {
		return append(b, "null"...)
	}
	format := byte('f')
	if a := math.Abs(v); a != 0 && (a < 1e-6 || a >= 1e21) {
		format = 'e'
	}
	b = strconv.AppendFloat(b, v, format, -1, 64)
	if n := len(b); format == 'e' && n >= 4 && b[n-4] == 'e' && (b[n-3] == '-' || b[n-3] == '+') && b[n-2] == '0' {
		b[n-2] = b[n-1]
		b = b[:n-1]
	}
	return b
}

// AppendString appends v in quotes. Invalid UTF-8 becomes U+FFFD.
func AppendString(b []byte, v string) []byte {
	b = append(b, '"')
	start := 0
	for i := plain(v); i < len(v); {
		c := v[i]
		if c >= 0x20 && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		if c < utf8.RuneSelf {
			b = append(b, v[start:i]...)
			b = appendEscape(b, c)
			i++
			start = i
			continue
		}
		r, size := utf8.DecodeRuneInString(v[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			b = append(b, v[start:i]...)
			b = append(b, `\ufffd`...)
			start = i + size
		case r == '\u2028' || r == '\u2029': // line ends in JavaScript
			b = append(b, v[start:i]...)
			b = append(b, `\u202`...)
			b = append(b, "89"[r-'\u2028'])
			start = i + size
		}
		i += size
	}
	b = append(b, v[start:]...)
	return append(b, '"')
}

// Words of eight equal bytes.
const ones, tops = 0x0101010101010101, 0x8080808080808080

// Special has top bits where a word of eight bytes may have a quote, a backslash or a control character: none when it has none. A byte
// below c leaves its top bit in (w - c·ones) & ^w, and a byte of 0 is below 1; what is XORed here leaves the top bits of w as they are.
func Special(w uint64) uint64 {
	quote, slash := w^(ones*'"'), w^(ones*'\\')
	return ((quote - ones) | (slash - ones) | (w - ones*0x20)) &^ w
}

// plain is how many bytes at the start of v are seen to need no escape, eight at a time.
func plain(v string) int {
	i := 0
	for ; i+8 <= len(v); i += 8 {
		w := uint64(v[i]) | uint64(v[i+1])<<8 | uint64(v[i+2])<<16 | uint64(v[i+3])<<24 |
			uint64(v[i+4])<<32 | uint64(v[i+5])<<40 | uint64(v[i+6])<<48 | uint64(v[i+7])<<56
		if (w|Special(w))&tops != 0 {
			break
		}
	}
	return i
}

func appendEscape(b []byte, c byte) []byte {
	switch c {
	case '"', '\\':
		return append(b, '\\', c)
	case '\b':
		return append(b, '\\', 'b')
	case '\f':
		return append(b, '\\', 'f')
	case '\n':
		return append(b, '\\', 'n')
	case '\r':
		return append(b, '\\', 'r')
	case '\t':
		return append(b, '\\', 't')
	}
	const hex = "0123456789abcdef"
	return append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
}
