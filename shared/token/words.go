package token

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// contraction is `'s|'t|'re|'ve|'m|'ll|'d`.
func contraction(s string) int {
	if s[0] != '\'' {
		return 0
	}
	return contractionTail(s[1:])
}

// foldedContraction is the same without regard to case. Folding also makes U+017F an s.
func foldedContraction(s string) int {
	if s[0] != '\'' || len(s) < 2 {
		return 0
	}
	if strings.HasPrefix(s[1:], "ſ") {
		return 1 + len("ſ")
	}
	return contractionTail(strings.ToLower(s[1:min(len(s), 3)]))
}

func contractionTail(s string) int {
	for _, c := range [...]string{"s", "t", "m", "d", "re", "ve", "ll"} {
		if strings.HasPrefix(s, c) {
			return 1 + len(c)
		}
	}
	return 0
}

// withContraction is word followed by `(?i:'s|…)?`.
func withContraction(word scanner) scanner {
	return func(s string) int {
		n := word(s)
		if n == 0 || n == len(s) {
			return n
		}
		return n + foldedContraction(s[n:])
	}
}

// isUpper is [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}], isLower is [\p{Ll}\p{Lm}\p{Lo}\p{M}]; isBoth is what they share.
func isUpper(r rune) bool { return unicode.In(r, unicode.Lu, unicode.Lt) || isBoth(r) }
func isLower(r rune) bool { return unicode.Is(unicode.Ll, r) || isBoth(r) }
func isBoth(r rune) bool  { return unicode.In(r, unicode.Lm, unicode.Lo, unicode.M) }

// casedWord is `[^\r\n\p{L}\p{N}]?[upper]*[lower]+`. The lead may be a mark, which is also a word character, so where
// the rest does not match after it, the match is tried without.
func casedWord(s string) int {
	if lead := leadLen(s); lead > 0 {
		if n := upperLower(s[lead:]); n > 0 {
			return lead + n
		}
	}
	return upperLower(s)
}

// upperLower is `[upper]*[lower]+`. The first part takes all that it can; where no small letter follows, it gives back
// up to the last character that both classes hold.
func upperLower(s string) int {
	i, shared := 0, 0
	for i < len(s) {
		r, n := utf8.DecodeRuneInString(s[i:])
		if !isUpper(r) {
			break
		}
		i += n
		if isBoth(r) {
			shared = i
		}
	}
	if n := run(s[i:], isLower, -1); n > 0 {
		return i + n
	}
	return shared
}

// capitalWord is `[^\r\n\p{L}\p{N}]?[upper]+[lower]*`.
func capitalWord(s string) int {
	if lead := leadLen(s); lead > 0 {
		if n := upperThenLower(s[lead:]); n > 0 {
			return lead + n
		}
	}
	return upperThenLower(s)
}

func upperThenLower(s string) int {
	n := run(s, isUpper, -1)
	if n == 0 {
		return 0
	}
	return n + run(s[n:], isLower, -1)
}
