package jinja

import "fmt"

// slice is Python's x[start:stop:step]. A bound that is not given is None.
func slice(x, start, stop, step any) (any, error) {
	by := 1
	if n, ok := integer(step); ok {
		by = n
	}
	if by == 0 {
		return nil, fmt.Errorf("slice step cannot be zero")
	}
	switch v := x.(type) {
	case List:
		out := List{}
		for _, i := range places(len(v), start, stop, by) {
			out = append(out, v[i])
		}
		return out, nil
	case string:
		runes := []rune(v)
		out := []rune{}
		for _, i := range places(len(runes), start, stop, by) {
			out = append(out, runes[i])
		}
		return string(out), nil
	}
	return nil, fmt.Errorf("a value of type %q cannot be sliced", kind(x))
}

// places lists the indices of a slice.
func places(n int, start, stop any, by int) []int {
	first, last := 0, n // what a bound is clamped to
	from, to := 0, n
	if by < 0 {
		first, last = -1, n-1
		from, to = n-1, -1
	}
	clamp := func(bound any, otherwise int) int {
		i, ok := integer(bound)
		if !ok {
			return otherwise
		}
		if i < 0 {
			i += n
		}
		return min(max(i, first), last)
	}
	from, to = clamp(start, from), clamp(stop, to)
	var out []int
	for i := from; by > 0 && i < to || by < 0 && i > to; i += by {
		out = append(out, i)
		if by > n || by < -n {
			break // the next one would be outside, or overflow
		}
	}
	return out
}
