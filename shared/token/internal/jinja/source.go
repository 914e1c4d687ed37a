package jinja

import (
	"errors"
	"fmt"
	"strings"
)

// prepare rewrites a template into what gonja's grammar accepts, with the same meaning:
//
//   - text between tags becomes {{ 'text' }}, with the white space control of its neighbours, trim_blocks and
//     lstrip_blocks applied: gonja strips spaces before a tag also where other output stands on the line;
//   - an expression is on one line, with spaces around words, and its strings are spelled the way gonja reads them;
//   - a conditional "a if c else b" becomes ((c) and [a] or [b])[0], since gonja knows it in one place only;
//   - the right side of "in" is in parentheses, since gonja takes only one name or literal there;
//   - a comma before a closing bracket is dropped.
//
// Line numbers stay what they were.
func prepare(source string) (string, error) {
	source = strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(source)
	source = strings.TrimSuffix(source, "\n")
	p := sourceReader{src: source, lineStart: true}
	for p.pos < len(source) {
		if err := p.step(); err != nil {
			return "", fmt.Errorf("line %d: %w", 1+strings.Count(source[:p.pos], "\n"), err)
		}
	}
	return p.out.String(), nil
}

// sourceReader goes through a template, text and tags in turn.
type sourceReader struct {
	src       string
	pos       int
	out       strings.Builder
	lineStart bool // the last tag took a newline with it, so that the text begins a line
}

// step handles the text up to the next tag, and the tag.
func (p *sourceReader) step() error {
	rest := p.src[p.pos:]
	n := nextTag(rest)
	if n == len(rest) {
		p.text(rest)
		p.pos = len(p.src)
		return nil
	}
	sign := byte(0)
	if len(rest) > n+2 && (rest[n+2] == '-' || rest[n+2] == '+') {
		sign = rest[n+2]
	}
	p.text(p.stripped(rest[:n], sign, rest[n+1] != '{'))
	p.pos += n
	inner := p.pos + 2
	if sign != 0 {
		inner++
	}
	switch rest[n+1] {
	case '#':
		return p.comment(inner)
	case '{':
		return p.tag(inner, "}}")
	}
	return p.tag(inner, "%}")
}

// nextTag returns the place of the next "{{", "{%" or "{#", or the length of s.
func nextTag(s string) int {
	for i := 0; i+1 < len(s); i++ {
		if s[i] == '{' && (s[i+1] == '{' || s[i+1] == '%' || s[i+1] == '#') {
			return i
		}
	}
	return len(s)
}

// stripped applies the sign of the tag that follows, or lstrip_blocks.
func (p *sourceReader) stripped(text string, sign byte, block bool) string {
	if sign == '-' {
		return strings.TrimRightFunc(text, isSpace)
	}
	if sign == '+' || !block {
		return text
	}
	line := strings.LastIndexByte(text, '\n') + 1
	if (line > 0 || p.lineStart) && strings.TrimFunc(text[line:], isSpace) == "" {
		return text[:line]
	}
	return text
}

// text writes literal text.
func (p *sourceReader) text(s string) {
	if s != "" {
		p.out.WriteString("{{ " + quote(s) + " }}")
	}
}

// end goes on after a tag whose closing delimiter, with its sign, ends at pos. A newline after a block, or all white
// space after a "-", belongs to the tag.
func (p *sourceReader) end(pos int, sign byte, block bool) {
	from := p.pos
	switch {
	case sign == '-':
		pos = len(p.src) - len(strings.TrimLeftFunc(p.src[pos:], isSpace))
	case sign != '+' && block && strings.HasPrefix(p.src[pos:], "\n"):
		pos++
	}
	p.lineStart = p.src[pos-1] == '\n'
	p.pos = pos
	if n := strings.Count(p.src[from:pos], "\n"); n > 0 {
		p.out.WriteString("{#" + strings.Repeat("\n", n) + "#}")
	}
}

func (p *sourceReader) comment(inner int) error {
	n := strings.Index(p.src[inner:], "#}")
	if n < 0 {
		return errors.New("a comment has no end")
	}
	sign := byte(0)
	if c := p.src[inner+n-1]; n > 0 && (c == '-' || c == '+') {
		sign = c
	}
	p.end(inner+n+2, sign, true)
	return nil
}

func (p *sourceReader) tag(inner int, closing string) error {
	l := lexer{src: p.src, pos: inner}
	tokens, end, err := l.tokens(closing)
	if err != nil {
		return err
	}
	sign := byte(0)
	if len(end) > len(closing) {
		sign = end[0]
	}
	block := closing == "%}"
	if block && len(tokens) == 1 && tokens[0].is('w', "raw") {
		p.end(l.pos, sign, false)
		return p.raw()
	}
	e := preparer{tokens: tokens}
	opening := "{{ "
	if block {
		e.tag = e.next().text
		opening = "{% " + e.tag + " "
	}
	body, err := e.list("")
	if err != nil {
		return err
	}
	p.out.WriteString(opening + body + " " + closing)
	p.end(l.pos, sign, block)
	return nil
}

// raw copies the text up to the next endraw.
func (p *sourceReader) raw() error {
	for from := p.pos; ; {
		n := strings.Index(p.src[from:], "{%")
		if n < 0 {
			return errors.New("raw has no endraw")
		}
		at := from + n
		from = at + 2
		sign := byte(0)
		if from < len(p.src) && (p.src[from] == '-' || p.src[from] == '+') {
			sign = p.src[from]
			from++
		}
		l := lexer{src: p.src, pos: from}
		tokens, end, err := l.tokens("%}")
		if err != nil || len(tokens) != 1 || !tokens[0].is('w', "endraw") {
			continue
		}
		p.text(p.stripped(p.src[p.pos:at], sign, true))
		p.pos = at
		endSign := byte(0)
		if len(end) > 2 {
			endSign = end[0]
		}
		p.end(l.pos, endSign, true)
		return nil
	}
}
