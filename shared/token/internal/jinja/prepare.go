package jinja

import (
	"fmt"
	"slices"
	"strings"
)

// preparer rewrites the tokens of one tag.
type preparer struct {
	tokens []token
	pos    int
	tag    string // "for", "set", …; empty in {{ }}
	depth  int
}

func (p *preparer) peek() token {
	if p.pos < len(p.tokens) {
		return p.tokens[p.pos]
	}
	return token{}
}

func (p *preparer) next() token {
	t := p.peek()
	p.pos++
	return t
}

// maxDepth bounds brackets and conditionals inside each other, which gonja parses by recursion.
const maxDepth = 100

func (p *preparer) enter() error {
	if p.depth++; p.depth > maxDepth {
		return fmt.Errorf("expressions are nested more than %d deep", maxDepth)
	}
	return nil
}

// list rewrites expressions with separators between them, up to the closing bracket.
func (p *preparer) list(closing string) (string, error) {
	var b strings.Builder
	for {
		part, err := p.conditional()
		if err != nil {
			return "", err
		}
		b.WriteString(part)
		t := p.next()
		switch {
		case t.is('o', closing), t.kind == 0 && closing == "":
			return b.String(), nil
		case t.is('o', ",") && closing != "" && p.peek().is('o', closing):
			if strings.TrimSpace(b.String()) != "" && closing == ")" && !strings.Contains(b.String(), ",") {
				b.WriteString(",") // (a,) is a tuple
			}
		case t.is('o', ","), t.is('o', ":"), t.is('o', "="):
			b.WriteString(t.text + " ")
		case t.kind == 0:
			return "", fmt.Errorf("expected %q", closing)
		default:
			return "", fmt.Errorf("unexpected %q", t.text)
		}
	}
}

// conditional rewrites "a if c else b" and what has no condition.
func (p *preparer) conditional() (string, error) {
	if err := p.enter(); err != nil {
		return "", err
	}
	defer func() { p.depth-- }()
	a, err := p.plain()
	if err != nil || !p.peek().is('w', "if") {
		return a, err
	}
	p.next()
	c, err := p.plain()
	if err != nil {
		return "", err
	}
	b := undefinedName
	if p.peek().is('w', "else") {
		p.next()
		if b, err = p.conditional(); err != nil {
			return "", err
		}
	}
	return "( ( " + c + ") and [ " + a + "] or [ " + b + "] ) [ 0 ] ", nil
}

// undefinedName is a variable that no template sets.
const undefinedName = "__undefined__"

// plain rewrites an expression without a condition of its own.
func (p *preparer) plain(stop ...string) (string, error) {
	var b strings.Builder
	for {
		t := p.peek()
		if t.kind == 0 || t.kind == 'o' && strings.Contains(",:=)]}", t.text) ||
			t.kind != 's' && slices.Contains(stop, t.text) {
			return b.String(), nil
		}
		if t.kind == 'w' && (t.text == "if" || t.text == "else") && (p.tag != "for" || p.depth > 1) {
			return b.String(), nil
		}
		p.next()
		part, err := p.part(t)
		if err != nil {
			return "", err
		}
		b.WriteString(part)
	}
}

// part rewrites one token, with the group that it opens.
func (p *preparer) part(t token) (string, error) {
	if t.kind == 's' {
		return quote(t.text) + " ", nil
	}
	if closing := map[string]string{"(": ")", "[": "]", "{": "}"}[t.text]; closing != "" {
		if err := p.enter(); err != nil {
			return "", err
		}
		defer func() { p.depth-- }()
		inside, err := p.list(closing)
		return t.text + " " + inside + closing + " ", err
	}
	if t.is('w', "in") {
		right, err := p.plain("and", "or", "not", "is", "in", "if", "else", "recursive", "==", "!=", "<", "<=", ">", ">=")
		return "in ( " + right + ") ", err
	}
	return t.text + " ", nil
}
