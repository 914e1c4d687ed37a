package jinja

import (
	"fmt"
	"strings"

	"github.com/nikolalohinski/gonja/v2/exec"
)

type test func(in any, a args) (bool, error)

// tests are the tests of jinja2: what may follow "is". "in" is one too, since gonja parses the operator as a test.
func tests() map[string]test {
	out := map[string]test{
		"defined":   simple(func(x any) bool { return x != nil }),
		"undefined": simple(func(x any) bool { return x == nil }),
		"none":      ofType[None],
		"string":    ofType[string],
		"mapping":   ofType[Dict],
		"boolean":   ofType[bool],
		"float":     ofType[float64],
		"integer":   simple(func(x any) bool { return kind(x) == "int" }),
		"number":    simple(isNumber),
		"sequence":  simple(isSequence),
		"iterable":  simple(isSequence),
		"true":      simple(func(x any) bool { return x == true }),
		"false":     simple(func(x any) bool { return x == false }),
		"callable":  simple(func(x any) bool { return kind(x) == "function" }),
		"odd":       parity(1),
		"even":      parity(0),
		"upper":     simple(func(x any) bool { return strings.ToUpper(text(x)) == text(x) }),
		"lower":     simple(func(x any) bool { return strings.ToLower(text(x)) == text(x) }),
		"in":        func(in any, a args) (bool, error) { return contains(a.at(0), in) },
		"eq":        func(in any, a args) (bool, error) { return equal(in, a.at(0)), nil },
		"ne":        func(in any, a args) (bool, error) { return !equal(in, a.at(0)), nil },
		"sameas":    func(in any, a args) (bool, error) { return kind(in) == kind(a.at(0)) && equal(in, a.at(0)), nil },
		"divisibleby": func(in any, a args) (bool, error) {
			rest, err := arithmetic("%", in, a.at(0))
			return rest == 0, err
		},
		"lt": ordered(func(c int) bool { return c < 0 }),
		"le": ordered(func(c int) bool { return c <= 0 }),
		"gt": ordered(func(c int) bool { return c > 0 }),
		"ge": ordered(func(c int) bool { return c >= 0 }),
	}
	for alias, name := range map[string]string{
		"equalto": "eq", "==": "eq", "!=": "ne", "lessthan": "lt", "greaterthan": "gt",
		"<": "lt", "<=": "le", ">": "gt", ">=": "ge",
	} {
		out[alias] = out[name]
	}
	return out
}

func simple(f func(any) bool) test {
	return func(x any, a args) (bool, error) {
		if len(a.pos) > 0 {
			return false, fmt.Errorf("takes no argument")
		}
		return f(x), nil
	}
}

func ofType[T any](x any, _ args) (bool, error) {
	_, ok := x.(T)
	return ok, nil
}

func isNumber(x any) bool {
	_, ok := number(x)
	return ok || kind(x) == "int"
}

// isSequence: jinja2 finds undefined values iterable and sequences too; no template should ask.
func isSequence(x any) bool {
	switch x.(type) {
	case string, List, Dict, nil:
		return true
	}
	return false
}

func parity(rest int) test {
	return simple(func(x any) bool {
		n, ok := integer(x)
		return ok && (n%2+2)%2 == rest
	})
}

func ordered(is func(int) bool) test {
	return func(x any, a args) (bool, error) {
		c, err := compare(x, a.at(0))
		return is(c), err
	}
}

// testFunc is the signature that gonja calls.
type testFunc = func(*exec.Evaluator, *exec.Value, *exec.VarArgs) (bool, error)
