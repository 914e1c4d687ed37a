package jinja

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// iterateArgs returns the items of a filter's input, for a filter that takes no arguments.
func iterateArgs(r *render, in any, a *args) (List, error) {
	if err := a.names(); err != nil {
		return nil, err
	}
	return r.iterate(in)
}

func firstFilter(r *render, in any, a args) (any, error) {
	list, err := iterateArgs(r, in, &a)
	if err != nil || len(list) == 0 {
		return nil, err
	}
	return list[0], nil
}

func lastFilter(r *render, in any, a args) (any, error) {
	list, err := iterateArgs(r, in, &a)
	if err != nil || len(list) == 0 {
		return nil, err
	}
	return list[len(list)-1], nil
}

func joinFilter(r *render, in any, a args) (any, error) {
	if err := a.names("d", "attribute"); err != nil {
		return nil, err
	}
	sep, err := a.str("d", "")
	if err != nil {
		return nil, err
	}
	list, err := r.iterate(in)
	if err != nil {
		return nil, err
	}
	if path := a.get("attribute"); path != nil {
		if list, err = r.paths(list, path, nil); err != nil {
			return nil, err
		}
	}
	return r.joinStrings(list, sep)
}

func reverseFilter(r *render, in any, a args) (any, error) {
	list, err := iterateArgs(r, in, &a)
	if err != nil {
		return nil, err
	}
	list = slices.Clone(list)
	slices.Reverse(list)
	if _, ok := in.(string); ok {
		return r.joinStrings(list, "")
	}
	return list, nil
}

func sortFilter(r *render, in any, a args) (any, error) {
	if err := a.names("reverse", "case_sensitive", "attribute"); err != nil {
		return nil, err
	}
	list, err := r.iterate(in)
	if err != nil {
		return nil, err
	}
	exact := truth(a.get("case_sensitive"))
	key := func(x any) any { return fold(x, exact) }
	if path := a.get("attribute"); path != nil {
		key = func(x any) any {
			v, _ := r.path(x, path)
			return fold(v, exact)
		}
	}
	return sorted(list, key, truth(a.get("reverse")))
}

func uniqueFilter(r *render, in any, a args) (any, error) {
	if err := a.names("case_sensitive"); err != nil {
		return nil, err
	}
	list, err := r.iterate(in)
	out, seen := List{}, List{}
	for _, v := range list {
		if err := r.tick(); err != nil {
			return nil, err
		}
		key := fold(v, truth(a.get("case_sensitive")))
		if found, _ := contains(seen, key); !found {
			out, seen = append(out, v), append(seen, key)
		}
	}
	return out, err
}

// extremeFilter is min (-1) or max (1).
func extremeFilter(sign int) filter {
	return func(r *render, in any, a args) (any, error) {
		if err := a.names("case_sensitive"); err != nil {
			return nil, err
		}
		list, err := r.iterate(in)
		var best any
		for i, v := range list {
			if i == 0 {
				best = v
				continue
			}
			exact := truth(a.get("case_sensitive"))
			c, err := compare(fold(v, exact), fold(best, exact))
			if err != nil {
				return nil, err
			}
			if c*sign > 0 {
				best = v
			}
		}
		return best, err
	}
}

func sumFilter(r *render, in any, a args) (any, error) {
	if err := a.names("attribute", "start"); err != nil {
		return nil, err
	}
	list, err := r.iterate(in)
	if err != nil {
		return nil, err
	}
	if path := a.get("attribute"); path != nil {
		if list, err = r.paths(list, path, nil); err != nil {
			return nil, err
		}
	}
	total := a.get("start")
	if total == nil {
		total = 0
	}
	for _, v := range list {
		if total, err = r.binary("+", total, v); err != nil {
			return nil, err
		}
	}
	return total, nil
}

// path reads an attribute given as jinja2's filters take it: a number, or names and numbers with dots between them.
func (r *render) path(x, path any) (any, error) {
	if n, ok := integer(path); ok {
		return r.item(x, n)
	}
	name, ok := path.(string)
	if !ok {
		return nil, fmt.Errorf("an attribute is of type %s, want str or int", kind(path))
	}
	for part := range strings.SplitSeq(name, ".") {
		var key any = part
		if n, err := strconv.Atoi(part); err == nil {
			key = n
		}
		var err error
		if x, err = r.item(x, key); err != nil {
			return nil, err
		}
	}
	return x, nil
}

func (r *render) paths(list List, path, otherwise any) (List, error) {
	out := make(List, len(list))
	for i, v := range list {
		var err error
		if out[i], err = r.path(v, path); err != nil {
			return nil, err
		}
		if out[i] == nil {
			out[i] = otherwise
		}
	}
	return out, r.room(16 * len(list))
}

// mapFilter is map("filter", …) or map(attribute="name", default=…).
func mapFilter(r *render, in any, a args) (any, error) {
	list, err := r.iterate(in)
	if err != nil {
		return nil, err
	}
	if path, ok := a.kw["attribute"]; ok {
		return r.paths(list, path, a.kw["default"])
	}
	name, ok := a.at(0).(string)
	if !ok {
		return nil, fmt.Errorf("map wants the name of a filter or attribute=")
	}
	f, ok := r.filters[name]
	if !ok {
		return nil, fmt.Errorf("no filter named %q", name)
	}
	out := make(List, len(list))
	for i, v := range list {
		if err := r.tick(); err != nil {
			return nil, err
		}
		if out[i], err = f(r, v, args{pos: a.pos[1:], kw: a.kw}); err != nil {
			return nil, err
		}
		if err := r.charge(out[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// selectFilter keeps the items (or those whose attribute) for which a test says want; without a test, truth decides.
func selectFilter(want, attr bool) filter {
	return func(r *render, in any, a args) (any, error) {
		list, err := r.iterate(in)
		if err != nil {
			return nil, err
		}
		var path any
		if attr {
			if len(a.pos) == 0 {
				return nil, fmt.Errorf("wants the name of an attribute")
			}
			path, a.pos = a.pos[0], a.pos[1:]
		}
		test, err := r.testNamed(&a)
		if err != nil {
			return nil, err
		}
		out := List{}
		for _, v := range list {
			if err := r.tick(); err != nil {
				return nil, err
			}
			x := v
			if attr {
				if x, err = r.path(v, path); err != nil {
					return nil, err
				}
			}
			got, err := test(x, a)
			if err != nil {
				return nil, err
			}
			if got == want {
				out = append(out, v)
			}
		}
		return out, nil
	}
}

// testNamed takes the name of a test from the arguments.
func (r *render) testNamed(a *args) (test, error) {
	if len(a.pos) == 0 {
		return func(x any, _ args) (bool, error) { return truth(x), nil }, nil
	}
	name, _ := a.pos[0].(string)
	t, ok := r.tests[name]
	if !ok {
		return nil, fmt.Errorf("no test named %s", repr(a.pos[0]))
	}
	a.pos = a.pos[1:]
	return t, nil
}
