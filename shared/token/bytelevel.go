package token

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// The byte-level alphabet of GPT-2: every byte is written as one printable character. Printable Latin-1 bytes stand for
// themselves; the other 68, in order, are U+0100 and up.

// mapByte returns the character that stands for byte b.
func mapByte(b byte) rune {
	switch {
	case b <= ' ':
		return 0x100 + rune(b)
	case b < 0x7F:
		return rune(b)
	case b <= 0xA0:
		return 0x100 + 33 + rune(b-0x7F)
	case b == 0xAD:
		return 0x100 + 67
	}
	return rune(b)
}

// unmapByte is the inverse of mapByte.
func unmapByte(r rune) (byte, bool) {
	switch {
	case r >= 0x100 && r < 0x100+33:
		return byte(r - 0x100), true
	case r >= 0x100+33 && r < 0x100+67:
		return byte(r-0x100-33) + 0x7F, true
	case r == 0x100+67:
		return 0xAD, true
	case r > ' ' && r < 0x7F, r > 0xA0 && r <= 0xFF && r != 0xAD:
		return byte(r), true
	}
	return 0, false
}

// unmapBytes returns the bytes that a byte-level token stands for. A token with any other character (an added token
// with a space, say) stands for its own UTF-8, whole.
func unmapBytes(piece string) string {
	out := make([]byte, 0, len(piece))
	for _, r := range piece {
		b, ok := unmapByte(r)
		if !ok {
			return piece
		}
		out = append(out, b)
	}
	return string(out)
}

// mapBytes spells s in the byte-level alphabet.
func mapBytes(s string) string {
	var b strings.Builder
	for i := range len(s) {
		b.WriteRune(mapByte(s[i]))
	}
	return b.String()
}

// byteTokenName is how a byte is spelled by a vocabulary with byte fallback.
func byteTokenName(b byte) string {
	const hex = "0123456789ABCDEF"
	return "<0x" + string([]byte{hex[b>>4], hex[b&15]}) + ">"
}

// byteToken reads "<0x41>".
func byteToken(piece string) (byte, bool) {
	if len(piece) != 6 || piece[:3] != "<0x" || piece[5] != '>' || !utf8.ValidString(piece) {
		return 0, false
	}
	n, err := strconv.ParseUint(piece[3:5], 16, 8)
	return byte(n), err == nil
}
