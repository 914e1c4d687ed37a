package jinja

import (
	"fmt"
	"slices"

	"github.com/nikolalohinski/gonja/v2/exec"
)

// args are the arguments of a call: by place and by name.
type args struct {
	pos    []any
	kw     map[string]any
	params []string // set by names
}

func newArgs(va *exec.VarArgs) args {
	a := args{pos: make([]any, len(va.Args)), kw: make(map[string]any, len(va.KwArgs))}
	for i, v := range va.Args {
		a.pos[i] = native(v)
	}
	for k, v := range va.KwArgs {
		a.kw[k] = native(v)
	}
	return a
}

// names declares the parameters in order; arguments beyond them are an error.
func (a *args) names(params ...string) error {
	if len(a.pos) > len(params) {
		return fmt.Errorf("%d arguments given, at most %d taken", len(a.pos), len(params))
	}
	for k := range a.kw {
		if !slices.Contains(params, k) {
			return fmt.Errorf("unexpected keyword argument %q", k)
		}
	}
	a.params = params
	return nil
}

// get returns a declared parameter, or undefined.
func (a *args) get(name string) any {
	if v, ok := a.kw[name]; ok {
		return v
	}
	return a.at(slices.Index(a.params, name))
}

// at returns the i-th argument by place, or undefined.
func (a *args) at(i int) any {
	if i < 0 || i >= len(a.pos) {
		return nil
	}
	return a.pos[i]
}

// str returns a declared parameter that must be a string when it is given.
func (a *args) str(name, otherwise string) (string, error) {
	switch v := a.get(name).(type) {
	case nil, None:
		return otherwise, nil
	case string:
		return v, nil
	default:
		return "", fmt.Errorf("argument %q is of type %s, want str", name, kind(v))
	}
}

// int returns a declared parameter that must be an integer when it is given.
func (a *args) int(name string, otherwise int) (int, error) {
	v := a.get(name)
	if n, ok := integer(v); ok {
		return n, nil
	}
	if v == nil {
		return otherwise, nil
	}
	return 0, fmt.Errorf("argument %q is of type %s, want int", name, kind(v))
}
