package jinja

import (
	"fmt"
	"math"
	"math/big"
	"reflect"
	"strconv"
	"strings"
	"unicode"

	"github.com/nikolalohinski/gonja/v2/exec"
)

// The values of a template are: nil (undefined), None, bool, int, *big.Int, float64, string, List, Dict, *namespace, and
// functions. None, List and Dict are slices so that gonja's own test for truth finds an empty one false.

// None is Python's None. Undefined, which is not the same, is nil.
type None []struct{}

// List is a Python list or tuple. A tuple prints with brackets, where Python prints parentheses.
type List []any

// Dict is a Python dict: it keeps the order of its keys.
type Dict []Pair

// Pair is one item of a Dict.
type Pair struct {
	Key   any
	Value any
}

// namespace is the object whose attributes {% set ns.x = … %} may change.
type namespace struct{ vars Dict }

// function is what a template can call.
type function = func(*exec.VarArgs) (any, error)

// Get returns the value of a key.
func (d Dict) Get(key any) (any, bool) {
	for _, p := range d {
		if equal(p.Key, key) {
			return p.Value, true
		}
	}
	return nil, false
}

// set replaces or appends an item.
func (d Dict) set(key, value any) Dict {
	for i := range d {
		if equal(d[i].Key, key) {
			d[i].Value = value
			return d
		}
	}
	return append(d, Pair{key, value})
}

// gonja prints values in its messages.

func (None) String() string   { return "None" }
func (l List) String() string { return text(l) }
func (d Dict) String() string { return text(d) }

// native returns the value inside gonja's wrapper.
func native(v *exec.Value) any {
	if v == nil || v.IsNil() {
		return nil
	}
	switch x := v.Interface().(type) {
	case *exec.Value:
		return native(x)
	case []any:
		return List(x)
	case exec.ValuesList:
		return fromValues(x)
	case [2]*exec.Value: // loop.previtem in a loop over pairs
		return fromValues(x[:])
	case *namespace, *big.Int:
		return x
	default:
		return scalar(x)
	}
}

func fromValues(values []*exec.Value) List {
	out := make(List, len(values))
	for i, v := range values {
		out[i] = native(v)
	}
	return out
}

// scalar makes one type of all integers, and one of named strings.
func scalar(x any) any {
	v := reflect.ValueOf(x)
	switch {
	case v.CanInt():
		return int(v.Int())
	case v.CanFloat():
		return v.Float()
	case v.Kind() == reflect.String:
		return v.String()
	}
	return x
}

// truth is Python's bool().
func truth(x any) bool {
	switch x := x.(type) {
	case nil, None:
		return false
	case bool:
		return x
	case int:
		return x != 0
	case float64:
		return x != 0
	case *big.Int:
		return x.Sign() != 0
	case string:
		return x != ""
	case List:
		return len(x) > 0
	case Dict:
		return len(x) > 0
	}
	return true
}

// number returns an int, bool or float as a float.
func number(x any) (float64, bool) {
	switch x := x.(type) {
	case bool:
		if x {
			return 1, true
		}
		return 0, true
	case int:
		return float64(x), true
	case float64:
		return x, true
	}
	return 0, false
}

// integer returns an int or bool as an int.
func integer(x any) (int, bool) {
	switch x := x.(type) {
	case bool:
		if x {
			return 1, true
		}
		return 0, true
	case int:
		return x, true
	}
	return 0, false
}

// equal is Python's ==.
func equal(a, b any) bool {
	if x, ok := number(a); ok {
		y, ok := number(b)
		return ok && x == y
	}
	switch x := a.(type) {
	case string:
		y, ok := b.(string)
		return ok && x == y
	case List:
		y, ok := b.(List)
		if !ok || len(x) != len(y) {
			return false
		}
		for i := range x {
			if !equal(x[i], y[i]) {
				return false
			}
		}
		return true
	case Dict:
		return equalDicts(x, b)
	case *big.Int:
		y, ok := b.(*big.Int)
		return ok && x.Cmp(y) == 0
	case nil:
		return b == nil
	case None:
		_, ok := b.(None)
		return ok
	case *namespace:
		y, ok := b.(*namespace)
		return ok && x == y
	}
	return false
}

func equalDicts(x Dict, b any) bool {
	y, ok := b.(Dict)
	if !ok || len(x) != len(y) {
		return false
	}
	for _, p := range x {
		if v, found := y.Get(p.Key); !found || !equal(v, p.Value) {
			return false
		}
	}
	return true
}

// text is Python's str().
func text(x any) string {
	switch x := x.(type) {
	case nil:
		return ""
	case string:
		return x
	}
	return repr(x)
}

// repr is Python's repr().
func repr(x any) string {
	switch x := x.(type) {
	case nil:
		return "Undefined"
	case None:
		return "None"
	case bool:
		if x {
			return "True"
		}
		return "False"
	case int:
		return strconv.Itoa(x)
	case *big.Int:
		return x.String()
	case float64:
		return reprFloat(x)
	case string:
		return reprString(x)
	case List:
		parts := make([]string, len(x))
		for i, v := range x {
			parts[i] = repr(v)
		}
		return "[" + strings.Join(parts, ", ") + "]"
	case Dict:
		parts := make([]string, len(x))
		for i, p := range x {
			parts[i] = repr(p.Key) + ": " + repr(p.Value)
		}
		return "{" + strings.Join(parts, ", ") + "}"
	}
	return "<" + kind(x) + ">"
}

// reprFloat writes the shortest digits that read back, with an exponent outside 1e-4..1e16.
func reprFloat(f float64) string {
	switch {
	case math.IsNaN(f):
		return "nan"
	case math.IsInf(f, 1):
		return "inf"
	case math.IsInf(f, -1):
		return "-inf"
	}
	if a := math.Abs(f); a != 0 && (a < 1e-4 || a >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	s := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(s, ".") {
		s += ".0"
	}
	return s
}

func reprString(s string) string {
	quote := byte('\'')
	if strings.Contains(s, "'") && !strings.Contains(s, `"`) {
		quote = '"'
	}
	var b strings.Builder
	b.WriteByte(quote)
	for _, r := range s {
		switch {
		case r == rune(quote) || r == '\\':
			b.WriteByte('\\')
			b.WriteRune(r)
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\r':
			b.WriteString(`\r`)
		case r == '\t':
			b.WriteString(`\t`)
		case unicode.IsPrint(r):
			b.WriteRune(r)
		case r < 0x100:
			fmt.Fprintf(&b, `\x%02x`, r)
		case r < 0x10000:
			fmt.Fprintf(&b, `\u%04x`, r)
		default:
			fmt.Fprintf(&b, `\U%08x`, r)
		}
	}
	b.WriteByte(quote)
	return b.String()
}

// kind names a value's type in messages, with Python's words.
func kind(x any) string {
	switch x.(type) {
	case nil:
		return "undefined"
	case None:
		return "NoneType"
	case bool:
		return "bool"
	case int, *big.Int:
		return "int"
	case float64:
		return "float"
	case string:
		return "str"
	case List:
		return "list"
	case Dict:
		return "dict"
	case *namespace:
		return "namespace"
	case exec.AttributeGetter:
		return "loop"
	}
	return "function"
}
