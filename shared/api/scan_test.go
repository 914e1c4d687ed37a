package api

import (
	"bytes"
	"testing"
)

// TestASpecialByteIsSeenWhereverItIs: in each place of a long string, beside each other byte.
func TestASpecialByteIsSeenWhereverItIs(t *testing.T) {
	for beside := range 256 {
		if beside < 0x20 || beside == '"' || beside == '\\' {
			continue
		}
		for c := range 256 {
			special := c < 0x20 || c == '"' || c == '\\'
			for at := range 40 {
				text := bytes.Repeat([]byte{byte(beside)}, 48)
				text[at] = byte(c)
				s := scanner{b: text}
				s.plain()
				if special && s.i != at/8*8 || !special && s.i != len(text) {
					t.Fatalf("byte %#x at %d beside %#x: plain up to %d", c, at, beside, s.i)
				}
			}
		}
	}
}
