package jinja

import (
	"fmt"
	"math"
	"strings"
)

// binary is Python's meaning of an operator.
func (r *render) binary(op string, a, b any) (any, error) {
	if err := r.weigh(a, b); err != nil {
		return nil, err
	}
	switch op {
	case "==":
		return equal(a, b), nil
	case "!=":
		return !equal(a, b), nil
	case "~":
		return text(a) + text(b), r.room(len(text(a)) + len(text(b)))
	}
	if a == nil || b == nil {
		return nil, fmt.Errorf("operand of %q is undefined", op)
	}
	switch op {
	case "<", "<=", ">", ">=":
		c, err := compare(a, b)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", op, err)
		}
		return map[string]bool{"<": c < 0, "<=": c <= 0, ">": c > 0, ">=": c >= 0}[op], nil
	case "+":
		if v, ok, err := r.concat(a, b); ok {
			return v, err
		}
	case "*":
		if v, ok, err := r.repeat(a, b); ok {
			return v, err
		}
	}
	return arithmetic(op, a, b)
}

// concat is + of strings and of lists.
func (r *render) concat(a, b any) (any, bool, error) {
	switch x := a.(type) {
	case string:
		if y, ok := b.(string); ok {
			if err := r.room(len(x) + len(y)); err != nil {
				return nil, true, err
			}
			return x + y, true, nil
		}
		return nil, true, fmt.Errorf("can only concatenate str (not %q) to str", kind(b))
	case List:
		if y, ok := b.(List); ok {
			if err := r.room(16 * (len(x) + len(y))); err != nil {
				return nil, true, err
			}
			return append(x[:len(x):len(x)], y...), true, nil
		}
		return nil, true, fmt.Errorf("can only concatenate list (not %q) to list", kind(b))
	}
	return nil, false, nil
}

// repeat is * of a string or list and a number, in either order.
func (r *render) repeat(a, b any) (any, bool, error) {
	if _, ok := integer(a); ok {
		a, b = b, a
	}
	n, ok := integer(b)
	if !ok {
		return nil, false, nil
	}
	n = max(n, 0)
	switch x := a.(type) {
	case string:
		if err := r.room(product(len(x), n)); err != nil {
			return nil, true, err
		}
		return strings.Repeat(x, n), true, nil
	case List:
		if err := r.room(product(16*len(x), n)); err != nil {
			return nil, true, err
		}
		out := make(List, 0, len(x)*n)
		for range n {
			out = append(out, x...)
		}
		return out, true, nil
	}
	return nil, false, nil
}

// product multiplies sizes without overflow.
func product(a, b int) int {
	if a != 0 && b > math.MaxInt/a {
		return math.MaxInt
	}
	return a * b
}

func arithmetic(op string, a, b any) (any, error) {
	x, ok1 := integer(a)
	y, ok2 := integer(b)
	if ok1 && ok2 && op != "/" && (op != "**" || y >= 0) {
		return integers(op, x, y)
	}
	f, ok1 := number(a)
	g, ok2 := number(b)
	if !ok1 || !ok2 {
		return nil, fmt.Errorf("unsupported operand types for %s: %q and %q", op, kind(a), kind(b))
	}
	if g == 0 && (op == "/" || op == "//" || op == "%") {
		return nil, fmt.Errorf("division by zero")
	}
	switch op {
	case "+":
		return f + g, nil
	case "-":
		return f - g, nil
	case "*":
		return f * g, nil
	case "/":
		return f / g, nil
	case "//":
		return math.Floor(f / g), nil
	case "%":
		return f - g*math.Floor(f/g), nil
	}
	return math.Pow(f, g), nil
}

// integers computes with ints; what leaves their range is an error, where Python would go on with big numbers.
func integers(op string, x, y int) (any, error) {
	var approx float64
	var exact int
	switch op {
	case "+":
		approx, exact = float64(x)+float64(y), x+y
	case "-":
		approx, exact = float64(x)-float64(y), x-y
	case "*":
		approx, exact = float64(x)*float64(y), x*y
	case "**":
		approx, exact = math.Pow(float64(x), float64(y)), int(math.Pow(float64(x), float64(y)))
		if math.Abs(approx) > 1<<53 {
			approx = math.Inf(1) // not exact any more
		}
	default:
		if y == 0 {
			return nil, fmt.Errorf("division by zero")
		}
		quotient, rest := x/y, x%y
		if rest != 0 && (rest < 0) != (y < 0) { // Python rounds down
			quotient, rest = quotient-1, rest+y
		}
		if op == "//" {
			return quotient, nil
		}
		return rest, nil
	}
	if math.Abs(approx) >= 1<<63-1024 {
		return nil, fmt.Errorf("%d %s %d is out of range", x, op, y)
	}
	return exact, nil
}

// compare orders two numbers, two strings or two lists.
func compare(a, b any) (int, error) {
	if x, ok := number(a); ok {
		if y, ok := number(b); ok {
			switch {
			case x < y:
				return -1, nil
			case x > y:
				return 1, nil
			}
			return 0, nil
		}
	}
	switch x := a.(type) {
	case string:
		if y, ok := b.(string); ok {
			return strings.Compare(x, y), nil
		}
	case List:
		if y, ok := b.(List); ok {
			for i := range min(len(x), len(y)) {
				if c, err := compare(x[i], y[i]); err != nil || c != 0 {
					return c, err
				}
			}
			return len(x) - len(y), nil
		}
	}
	return 0, fmt.Errorf("values of types %q and %q have no order", kind(a), kind(b))
}

// contains is Python's in.
func contains(in, x any) (bool, error) {
	switch c := in.(type) {
	case string:
		s, ok := x.(string)
		if !ok {
			return false, fmt.Errorf("'in <string>' requires a string as left operand, not %s", kind(x))
		}
		return strings.Contains(c, s), nil
	case List:
		for _, v := range c {
			if equal(v, x) {
				return true, nil
			}
		}
		return false, nil
	case Dict:
		_, ok := c.Get(x)
		return ok, nil
	case nil:
		return false, nil // jinja2's Undefined iterates as empty
	}
	return false, fmt.Errorf("argument of type %q is not iterable", kind(in))
}

// iterate returns what a for loop runs over.
func (r *render) iterate(x any) (List, error) {
	switch x := x.(type) {
	case nil:
		return List{}, nil
	case List:
		return x, nil
	case Dict:
		out := make(List, len(x))
		for i, p := range x {
			out[i] = p.Key
		}
		return out, r.room(16 * len(x))
	case string:
		out := List{}
		if err := r.room(24 * len(x)); err != nil {
			return nil, err
		}
		for _, c := range x {
			out = append(out, string(c))
		}
		return out, nil
	}
	return nil, fmt.Errorf("a value of type %q is not iterable", kind(x))
}
