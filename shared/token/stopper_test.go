package token

import (
	"strings"
	"testing"
)

func TestStopper(t *testing.T) {
	tests := []struct {
		name  string
		stops string // separated by commas
		parts string // separated by bars
		emit  string // what each Push gives, then Flush
		which string
	}{
		{"without stop strings everything passes", "", "a|b", "a|b|", ""},
		{"a stop string inside one part ends the text", "END", "some END more", "some |", "END"},
		{"a stop string over three parts is never shown", "END", "a E|N|D b", "a |||", "END"},
		{"a false start is released as soon as it is one", "END", "E|N|x", "||ENx|", ""},
		{"a false start inside a false start is kept", "aab", "aa|a|b", "|a||", "aab"},
		{"what is held at the end comes with the flush", "END", "x EN", "x |EN", ""},
		{"the stop string that is complete first counts", "bcd,c", "abcd", "ab|", "c"},
		{"of two complete at one place the longest counts", "cd,bcd", "abcd", "a|", "bcd"},
		{"a stop string at the very start leaves nothing", "x", "xyz", "|", "x"},
		{"characters of several bytes stay whole", "é!", "caf|é|?", "caf||é?|", ""},
		{"nothing comes after the stop", "x", "axb|c", "a||", "x"},
		{"empty stop strings are ignored", ",x", "ab", "ab|", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := NewStopper(strings.Split(tt.stops, ","))
			var got []string
			stopped, which := false, ""
			for _, part := range strings.Split(tt.parts, "|") {
				var emit string
				emit, stopped, which = s.Push(part)
				got = append(got, emit)
			}
			got = append(got, s.Flush())
			if g := strings.Join(got, "|"); g != tt.emit {
				t.Errorf("emitted %q, want %q", g, tt.emit)
			}
			if which != tt.which || stopped != (tt.which != "") {
				t.Errorf("stopped %v by %q, want %q", stopped, which, tt.which)
			}
		})
	}
}

// firstStop is the definition: the smallest end, then the longest.
func firstStop(text string, stops []string) (before, which string, found bool) {
	for end := 1; end <= len(text); end++ {
		for _, s := range stops {
			if s != "" && strings.HasSuffix(text[:end], s) && len(s) > len(which) {
				which = s
			}
		}
		if which != "" {
			return text[:end-len(which)], which, true
		}
	}
	return text, "", false
}

func FuzzStopper(f *testing.F) {
	f.Add("hello END world", "END", "wor", uint8(3))
	f.Add("aaaaab", "aab", "ab", uint8(1))
	f.Add("日本語のテキスト", "語の", "テ", uint8(2))
	f.Fuzz(func(t *testing.T, text, a, b string, cut uint8) {
		if len(text) > 1000 {
			return
		}
		stops := []string{a, b}
		before, which, found := firstStop(text, stops)
		s := NewStopper(stops)
		var out strings.Builder
		stopped, got := false, ""
		step := int(cut)%7 + 1
		for i := 0; i < len(text) && !stopped; i += step {
			var emit string
			emit, stopped, got = s.Push(text[i:min(i+step, len(text))])
			out.WriteString(emit)
			if held := len(s.held); held >= max(len(a), len(b), 1) {
				t.Fatalf("holds %d bytes, more than any stop string could need", held)
			}
		}
		out.WriteString(s.Flush())
		if out.String() != before || got != which || stopped != found {
			t.Fatalf("got %q by %q (%v), want %q by %q (%v)", out.String(), got, stopped, before, which, found)
		}
	})
}
