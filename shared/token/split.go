package token

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// The split patterns of tokenizer.json need look-ahead and Unicode classes, which Go's regexp lacks in part. They are
// all alternations of few alternatives; each is a scanner here, and a pattern is its scanners in order, as the first
// alternative that matches wins.

// scanner returns how many bytes at the start of s its alternative matches; 0 is no match. Every alternative takes its
// characters greedily and gives back at most once, so each is linear.
type scanner func(s string) int

// alternatives are those that occur in patterns of known models, longest spelling first where one begins another.
func alternatives() []struct {
	spelling string
	scan     scanner
} {
	return []struct {
		spelling string
		scan     scanner
	}{
		// contractions
		{`(?i:'s|'t|'re|'ve|'m|'ll|'d)`, foldedContraction},
		{`'(?i:[sdmt]|ll|ve|re)`, foldedContraction},
		{`'s|'t|'re|'ve|'m|'ll|'d`, contraction},
		// words of the o200k and Tekken patterns: capitals first, then small letters
		{`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?`, withContraction(casedWord)},
		{`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?`, withContraction(capitalWord)},
		{`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+`, casedWord},
		{`[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*`, capitalWord},
		// words
		{`[^\r\n\p{L}\p{N}]?\p{L}+`, prefixed(isLetter)},
		{`[^\r\n\p{L}\p{N}]?+\p{L}+`, prefixed(isLetter)},
		{` ?\p{L}+`, spaced(isLetter, "")},
		{`\p{L}+`, many(isLetter, -1)},
		// numbers
		{`\p{N}{1,3}`, many(unicode.IsNumber, 3)},
		{` ?\p{N}+`, spaced(unicode.IsNumber, "")},
		{`\p{N}+`, many(unicode.IsNumber, -1)},
		{`\p{N}`, many(unicode.IsNumber, 1)},
		// everything else that is not white space
		{` ?[^\s\p{L}\p{N}]+[\r\n/]*`, spaced(isSymbol, "\r\n/")},
		{` ?[^\s\p{L}\p{N}]++[\r\n]*`, spaced(isSymbol, "\r\n")},
		{` ?[^\s\p{L}\p{N}]+[\r\n]*`, spaced(isSymbol, "\r\n")},
		{` ?[^\s\p{L}\p{N}]+`, spaced(isSymbol, "")},
		// white space
		{`\s*[\r\n]+`, throughNewline},
		{`\s*[\r\n]`, throughNewline},
		{`\s+(?!\S)`, spaceBeforeSpace},
		{`\s+`, many(unicode.IsSpace, -1)},
	}
}

// gpt2Pattern is what ByteLevel with use_regex splits by.
const gpt2Pattern = `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`

// compilePattern turns a pattern into its scanners, or refuses it.
func compilePattern(pattern string) ([]scanner, error) {
	var out []scanner
	known := alternatives()
	for rest := pattern; ; {
		found := false
		for _, a := range known {
			tail, ok := strings.CutPrefix(rest, a.spelling)
			if !ok || tail != "" && tail[0] != '|' {
				continue
			}
			out = append(out, a.scan)
			if tail == "" {
				return out, nil
			}
			rest, found = tail[1:], true
			break
		}
		if !found {
			return nil, fmt.Errorf("the split pattern %q is not supported: no known alternative at %q", pattern, rest)
		}
	}
}

// scan returns the length of the first match at the start of s, or 0.
func scan(scanners []scanner, s string) int {
	for _, f := range scanners {
		if n := f(s); n > 0 {
			return n
		}
	}
	return 0
}

func isLetter(r rune) bool { return unicode.IsLetter(r) }

func isSymbol(r rune) bool {
	return !unicode.IsSpace(r) && !unicode.IsLetter(r) && !unicode.IsNumber(r)
}

// run returns the length of the characters of a class at the start of s, at most limit of them (-1: any number).
func run(s string, class func(rune) bool, limit int) int {
	i := 0
	for i < len(s) && limit != 0 {
		r, n := utf8.DecodeRuneInString(s[i:])
		if !class(r) {
			break
		}
		i += n
		limit--
	}
	return i
}

// many is X+ or X{1,limit}.
func many(class func(rune) bool, limit int) scanner {
	return func(s string) int { return run(s, class, limit) }
}

// spaced is " ?X+[tail]*".
func spaced(class func(rune) bool, tail string) scanner {
	return func(s string) int {
		i := 0
		if s[0] == ' ' {
			i = 1
		}
		n := run(s[i:], class, -1)
		if n == 0 {
			return 0
		}
		i += n
		for i < len(s) && strings.IndexByte(tail, s[i]) >= 0 {
			i++
		}
		return i
	}
}

// leadLen is the length of the one character that `[^\r\n\p{L}\p{N}]?` takes.
func leadLen(s string) int {
	r, n := utf8.DecodeRuneInString(s)
	if r == '\r' || r == '\n' || unicode.IsLetter(r) || unicode.IsNumber(r) {
		return 0
	}
	return n
}

// prefixed is `[^\r\n\p{L}\p{N}]?X+`, for an X that the lead cannot be.
func prefixed(class func(rune) bool) scanner {
	return func(s string) int {
		lead := leadLen(s)
		if n := run(s[lead:], class, -1); n > 0 {
			return lead + n
		}
		return 0
	}
}

func throughNewline(s string) int {
	end := 0
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		if !unicode.IsSpace(r) {
			break
		}
		i += n
		if r == '\r' || r == '\n' {
			end = i
		}
	}
	return end
}

// spaceBeforeSpace is `\s+(?!\S)`: white space up to the end of the text, else all but its last character.
func spaceBeforeSpace(s string) int {
	n := run(s, unicode.IsSpace, -1)
	if n == 0 || n == len(s) {
		return n
	}
	_, last := utf8.DecodeLastRuneInString(s[:n])
	return n - last
}
