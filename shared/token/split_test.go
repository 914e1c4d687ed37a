package token

import (
	"slices"
	"strings"
	"testing"
)

// TestPatternsSplitAsRegularExpressionsDo compares the scanners with splits by Perl, which has what Go's regexp lacks.
func TestPatternsSplitAsRegularExpressionsDo(t *testing.T) {
	var golden struct {
		Texts []string
		Cases []struct {
			Pattern string
			Splits  [][]string
		}
	}
	readJSON(t, "testdata/splits.json", &golden)
	for _, c := range golden.Cases {
		scanners, err := compilePattern(c.Pattern)
		if err != nil {
			t.Fatal(err)
		}
		for i, text := range golden.Texts {
			got := []string{}
			if text != "" {
				isolate(scanners, true, true)(text, true, func(p string, _ bool) { got = append(got, p) })
			}
			if !slices.Equal(got, c.Splits[i]) {
				t.Errorf("%s\n splits %q\n into %q\n want %q", c.Pattern, text, got, c.Splits[i])
			}
		}
	}
}

func TestAnUnknownPatternIsRefusedWithItsText(t *testing.T) {
	for _, pattern := range []string{`\w+`, `\p{N}{1,4}`, `\s+|`, ``, `\p{L}+x`, `(?i:'s|'t)`} {
		if _, err := compilePattern(pattern); err == nil || pattern != "" && !strings.Contains(err.Error(), strings.ReplaceAll(pattern, `\`, `\\`)) {
			t.Errorf("%q gave %v", pattern, err)
		}
	}
}

// FuzzSplit checks that a pattern loses no text.
func FuzzSplit(f *testing.F) {
	for _, s := range []string{"Hello, world!", "don't  x\n\n y ", "ǅ́字'ſ", "\xff a"} {
		f.Add(s)
	}
	var all [][]scanner
	for _, p := range []string{
		gpt2Pattern,
		`(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
		`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+`,
	} {
		scanners, err := compilePattern(p)
		if err != nil {
			f.Fatal(err)
		}
		all = append(all, scanners)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, scanners := range all {
			var got strings.Builder
			if text != "" {
				isolate(scanners, true, true)(text, true, func(p string, _ bool) { got.WriteString(p) })
			}
			if got.String() != text {
				t.Fatalf("%q became %q", text, got.String())
			}
		}
	})
}
