package jinja

import (
	"fmt"
	"unicode/utf8"

	"github.com/nikolalohinski/gonja/v2/exec"
)

// attribute is x.name: Python's attribute, else the item of that name. What is missing is undefined.
func (r *render) attribute(x any, name string) (any, error) {
	switch v := x.(type) {
	case nil:
		return nil, fmt.Errorf("cannot read .%s of an undefined value", name)
	case *namespace:
		value, _ := v.vars.Get(name)
		return value, nil
	case exec.AttributeGetter: // the loop variable
		if depth, ok := map[string]int{"depth": 1, "depth0": 0}[name]; ok {
			return depth, nil // jinja2 counts recursive loops only, and there are none
		}
		value, _ := v.GetAttribute(name)
		return native(value), nil
	case string:
		if m, ok := stringMethods()[name]; ok {
			return r.bind(name, func(a args) (any, error) { return m(r, v, a) }), nil
		}
	case Dict:
		if m, ok := dictMethods()[name]; ok {
			return r.bind(name, func(a args) (any, error) { return m(v, a) }), nil
		}
		value, _ := v.Get(name)
		return value, nil
	case List:
		if m, ok := listMethods()[name]; ok {
			return r.bind(name, func(a args) (any, error) { return m(v, a) }), nil
		}
	}
	return nil, nil
}

// item is x[key].
func (r *render) item(x, key any) (any, error) {
	switch v := x.(type) {
	case nil:
		return nil, fmt.Errorf("cannot read [%s] of an undefined value", repr(key))
	case Dict:
		if value, ok := v.Get(key); ok {
			return value, nil
		}
	case List:
		if i, ok := index(key, len(v)); ok {
			return v[i], nil
		}
	case string:
		if i, ok := index(key, utf8.RuneCountInString(v)); ok {
			return runeAt(v, i), nil
		}
	}
	if name, ok := key.(string); ok {
		return r.attribute(x, name)
	}
	return nil, nil
}

// index resolves a subscript, which counts from the end when negative.
func index(key any, n int) (int, bool) {
	i, ok := integer(key)
	if i < 0 {
		i += n
	}
	return i, ok && i >= 0 && i < n
}

func runeAt(s string, n int) string {
	for _, c := range s {
		if n == 0 {
			return string(c)
		}
		n--
	}
	return ""
}

// bind makes a method callable by gonja.
func (r *render) bind(name string, f func(args) (any, error)) function {
	return func(va *exec.VarArgs) (any, error) {
		a := newArgs(va)
		var out any
		err := r.weigh(a.pos...)
		if err == nil {
			out, err = f(a)
		}
		if err == nil {
			err = r.charge(out)
		}
		if err != nil {
			return nil, r.keep(fmt.Errorf("%s(): %w", name, err))
		}
		return out, nil
	}
}

func dictMethods() map[string]func(Dict, args) (any, error) {
	return map[string]func(Dict, args) (any, error){
		"get": func(d Dict, a args) (any, error) {
			if err := a.names("key", "default"); err != nil {
				return nil, err
			}
			if v, ok := d.Get(a.get("key")); ok {
				return v, nil
			}
			if v := a.get("default"); v != nil {
				return v, nil
			}
			return None{}, nil
		},
		"items": func(d Dict, a args) (any, error) { return items(d), a.names() },
		"keys": func(d Dict, a args) (any, error) {
			out := make(List, len(d))
			for i, p := range d {
				out[i] = p.Key
			}
			return out, a.names()
		},
		"values": func(d Dict, a args) (any, error) {
			out := make(List, len(d))
			for i, p := range d {
				out[i] = p.Value
			}
			return out, a.names()
		},
		"copy": func(d Dict, a args) (any, error) { return append(Dict{}, d...), a.names() },
		// What would change a value is refused, as transformers' immutable sandbox does.
		"update": func(Dict, args) (any, error) { return nil, errImmutable },
		"pop":    func(Dict, args) (any, error) { return nil, errImmutable },
	}
}

func items(d Dict) List {
	out := make(List, len(d))
	for i, p := range d {
		out[i] = List{p.Key, p.Value}
	}
	return out
}

func listMethods() map[string]func(List, args) (any, error) {
	return map[string]func(List, args) (any, error){
		"index": func(l List, a args) (any, error) {
			for i, v := range l {
				if equal(v, a.at(0)) {
					return i, nil
				}
			}
			return nil, fmt.Errorf("%s is not in the list", repr(a.at(0)))
		},
		"count": func(l List, a args) (any, error) {
			n := 0
			for _, v := range l {
				if equal(v, a.at(0)) {
					n++
				}
			}
			return n, nil
		},
		"copy":   func(l List, a args) (any, error) { return append(List{}, l...), a.names() },
		"append": func(List, args) (any, error) { return nil, errImmutable },
		"extend": func(List, args) (any, error) { return nil, errImmutable },
		"insert": func(List, args) (any, error) { return nil, errImmutable },
		"pop":    func(List, args) (any, error) { return nil, errImmutable },
	}
}
