package token

import (
	"strings"
	"unicode/utf8"
)

const replacement = "\uFFFD"

// validUTF8 replaces each maximal broken part of s by U+FFFD, as Rust's and Python's lossy conversions do.
func validUTF8(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	text, _ := lossy([]byte(s), true)
	return text
}

// lossy returns the text of b and how many bytes of b it covers. A last character that more bytes could still
// complete is left out, unless final.
func lossy(b []byte, final bool) (text string, n int) {
	var out strings.Builder
	clean := 0 // b[clean:n] is valid and not yet in out
	for n < len(b) {
		r, size := utf8.DecodeRune(b[n:])
		if r != utf8.RuneError || size > 1 {
			n += size
			continue
		}
		if !final && !utf8.FullRune(b[n:]) {
			break
		}
		out.Write(b[clean:n])
		out.WriteString(replacement)
		n += brokenLen(b[n:])
		clean = n
	}
	if clean == 0 {
		return string(b[:n]), n
	}
	out.Write(b[clean:n])
	return out.String(), n
}

// brokenLen is the length of the broken part that b begins with: the longest prefix that some character starts with,
// but one byte at least. "E4 BD 41" is broken for two bytes, and becomes one U+FFFD and an "A".
func brokenLen(b []byte) int {
	n := 1
	for n < len(b) && n < utf8.UTFMax-1 && !utf8.FullRune(b[:n+1]) {
		n++
	}
	return n
}
