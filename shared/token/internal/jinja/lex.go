package jinja

import (
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// token is a part of an expression.
type token struct {
	kind byte   // 's' string, 'w' word or number, 'o' operator, 0 the end
	text string // a string is decoded
}

func (t token) is(kind byte, text string) bool { return t.kind == kind && t.text == text }

// operators of two characters; all others have one.
const (
	twoCharOperators = "**//==!=<=>="
	oneCharOperators = "+-*/%~<>=.,:|()[]{}"
)

// lexer cuts the inside of {{ }} and {% %} into tokens.
type lexer struct {
	src   string
	pos   int
	depth int // of brackets
}

// tokens reads up to the closing delimiter, which it returns with its white space control.
func (l *lexer) tokens(closing string) (out []token, end string, err error) {
	for {
		rest := l.src[l.pos:]
		r, n := utf8.DecodeRuneInString(rest)
		switch {
		case rest == "":
			return nil, "", fmt.Errorf("expected %q before the end of the template", closing)
		case unicode.IsSpace(r):
			l.pos += n
			continue
		case l.depth == 0 && strings.HasPrefix(rest, closing):
			l.pos += len(closing)
			return out, closing, nil
		case l.depth == 0 && (r == '-' || r == '+') && strings.HasPrefix(rest[1:], closing):
			l.pos += 1 + len(closing)
			return out, rest[:1] + closing, nil
		}
		t, err := l.token(r)
		if err != nil {
			return nil, "", err
		}
		if last := len(out) - 1; t.kind == 's' && last >= 0 && out[last].kind == 's' {
			out[last].text += t.text // as in Python, neighbouring strings are one
			continue
		}
		out = append(out, t)
	}
}

func (l *lexer) token(r rune) (token, error) {
	rest := l.src[l.pos:]
	switch {
	case r == '\'' || r == '"':
		return l.str(byte(r))
	case r == '_' || unicode.IsLetter(r):
		n := strings.IndexFunc(rest, func(r rune) bool { return r != '_' && !unicode.IsLetter(r) && !unicode.IsDigit(r) })
		if n < 0 {
			n = len(rest)
		}
		l.pos += n
		return token{'w', rest[:n]}, nil
	case r >= '0' && r <= '9':
		n := numberLen(rest)
		l.pos += n
		return token{'w', rest[:n]}, nil
	case len(rest) > 1 && indexPair(twoCharOperators, rest[:2]):
		l.pos += 2
		return token{'o', rest[:2]}, nil
	case strings.ContainsRune(oneCharOperators, r):
		l.pos++
		return token{'o', rest[:1]}, l.count(r)
	}
	return token{}, fmt.Errorf("unexpected character %q", r)
}

func (l *lexer) count(r rune) error {
	switch r {
	case '(', '[', '{':
		l.depth++
	case ')', ']', '}':
		l.depth--
	}
	if l.depth < 0 {
		return fmt.Errorf("unexpected %q", r)
	}
	return nil
}

// indexPair reports whether pair stands in list at an even place.
func indexPair(list, pair string) bool {
	for i := 0; i < len(list); i += 2 {
		if list[i:i+2] == pair {
			return true
		}
	}
	return false
}

func numberLen(s string) int {
	digits := func(i int) int {
		for i < len(s) && (s[i] >= '0' && s[i] <= '9' || s[i] == '_') {
			i++
		}
		return i
	}
	n := digits(0)
	if n+1 < len(s) && s[n] == '.' && s[n+1] >= '0' && s[n+1] <= '9' {
		n = digits(n + 1)
	}
	if n+1 < len(s) && (s[n] == 'e' || s[n] == 'E') {
		m := n + 1
		if s[m] == '-' || s[m] == '+' {
			m++
		}
		if end := digits(m); end > m {
			n = end
		}
	}
	return n
}

// str reads a string literal with Python's escapes.
func (l *lexer) str(quote byte) (token, error) {
	var b strings.Builder
	for i := l.pos + 1; i < len(l.src); i++ {
		switch c := l.src[i]; c {
		case quote:
			l.pos = i + 1
			return token{'s', b.String()}, nil
		case '\\':
			n := unescape(&b, l.src[i:])
			i += n - 1
		default:
			b.WriteByte(c)
		}
	}
	return token{}, fmt.Errorf("the string %.20q has no end", l.src[l.pos:])
}

// unescape decodes the escape that s begins with, and returns its length. What is no escape stays as it is.
func unescape(b *strings.Builder, s string) int {
	const simple = "n\nt\tr\r\\\\''\"\"a\ab\bf\fv\v"
	if len(s) < 2 {
		b.WriteString(s)
		return len(s)
	}
	for i := 0; i < len(simple); i += 2 {
		if simple[i] == s[1] {
			b.WriteByte(simple[i+1])
			return 2
		}
	}
	digits := map[byte]int{'x': 2, 'u': 4, 'U': 8}[s[1]]
	if digits > 0 && len(s) >= 2+digits {
		if n, err := strconv.ParseUint(s[2:2+digits], 16, 32); err == nil {
			b.WriteRune(rune(n))
			return 2 + digits
		}
	}
	if s[1] == '\n' { // a line that goes on
		return 2
	}
	b.WriteByte('\\')
	return 1
}

// quote spells a string in gonja's grammar, whose own escapes go wrong at backslashes and quotes.
func quote(s string) string {
	return "'" + strings.NewReplacer(`\`, `\x5c`, "'", `\x27`).Replace(s) + "'"
}
