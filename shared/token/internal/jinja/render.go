package jinja

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/nikolalohinski/gonja/v2/exec"
)

// Limits bound what one Render may use.
type Limits struct {
	Text int // bytes of any one string, and of all text printed
	Work int // bytes of all values made on the way
}

// DefaultLimits suit prompts of millions of tokens.
func DefaultLimits() Limits { return Limits{Text: 16 << 20, Work: 512 << 20} }

var (
	errTooLong   = errors.New("the text is longer than allowed")
	errTooMuch   = errors.New("the template makes more data than allowed")
	errTooDeep   = errors.New("macros are nested too deep")
	errImmutable = errors.New("changing a value is not allowed")
)

// RaisedError is returned when the template called raise_exception.
type RaisedError struct{ Message string }

func (e *RaisedError) Error() string { return e.Message }

// render is the state of one Render call. It holds the call's context because gonja calls our functions without one.
type render struct {
	ctx     context.Context
	limits  Limits
	filters map[string]filter
	tests   map[string]test
	printed int
	work    int
	depth   int   // of macros
	err     error // the first error: gonja wraps errors in ways that lose them, or drops them
}

// keep remembers the first error.
func (r *render) keep(err error) error {
	if r.err == nil {
		r.err = err
	}
	return err
}

// tick is called at every step of every kind, and ends the rendering when its time is over.
func (r *render) tick() error { return r.ctx.Err() }

// room asks for the bytes of a value that is about to be made.
func (r *render) room(bytes int) error {
	if bytes > r.limits.Text {
		return errTooLong
	}
	r.work += bytes
	if r.work > r.limits.Work {
		return errTooMuch
	}
	return r.tick()
}

// charge is room for a value that exists already.
func (r *render) charge(x any) error {
	switch x := x.(type) {
	case string:
		return r.room(len(x))
	case List:
		return r.room(16 * len(x))
	case Dict:
		return r.room(32 * len(x))
	}
	return nil
}

// weigh bounds a walk over all that a value holds: lists that share their elements can be exponentially larger than what was charged
// for them.
func (r *render) weigh(values ...any) error {
	left := r.limits.Text
	var walk func(x any) bool
	walk = func(x any) bool {
		if left--; left < 0 {
			return false
		}
		switch x := x.(type) {
		case List:
			for _, v := range x {
				if !walk(v) {
					return false
				}
			}
		case Dict:
			for _, p := range x {
				if !walk(p.Key) || !walk(p.Value) {
					return false
				}
			}
		}
		return true
	}
	for _, v := range values {
		if !walk(v) {
			return errTooLong
		}
	}
	return nil
}

// print turns a value into text for the output.
func (r *render) print(x any) (any, error) {
	if err := r.weigh(x); err != nil {
		return nil, err
	}
	s := text(x)
	r.printed += len(s)
	if r.printed > r.limits.Text {
		return nil, errTooLong
	}
	return s, r.tick()
}

// environment returns the functions that gonja looks up by name.
func (r *render) environment(vars map[string]any) *exec.Environment {
	filters := map[string]exec.FilterFunction{}
	for name, f := range r.filters {
		filters[name] = r.gonjaFilter(name, f)
	}
	for name, f := range internalFilters() {
		filters[name] = r.gonjaFilter(name, f)
	}
	tests := map[string]exec.TestFunction{}
	for name, t := range r.tests {
		tests[name] = r.gonjaTest(name, t)
	}
	return &exec.Environment{
		Filters: exec.NewFilterSet(filters),
		Tests:   exec.NewTestSet(tests),
		Context: exec.NewContext(vars),
		Methods: exec.Methods{}, // never asked: methods come from attribute
	}
}

func (r *render) gonjaFilter(name string, f filter) exec.FilterFunction {
	return func(_ *exec.Evaluator, in *exec.Value, va *exec.VarArgs) *exec.Value {
		if in.IsError() {
			return exec.AsValue(r.keep(errors.New(in.Error())))
		}
		x, a := native(in), newArgs(va)
		var out any
		err := error(nil)
		if !strings.HasPrefix(name, internalPrefix) { // of those, who walks a whole value weighs it
			err = r.weigh(append(a.pos, x)...)
		}
		if err == nil {
			out, err = f(r, x, a)
		}
		if err == nil {
			err = r.charge(out)
		}
		if err == nil {
			err = r.tick()
		}
		if err != nil {
			return exec.AsValue(r.keep(describe(name, err)))
		}
		return exec.AsValue(out)
	}
}

func (r *render) gonjaTest(name string, t test) testFunc {
	return func(_ *exec.Evaluator, in *exec.Value, va *exec.VarArgs) (bool, error) {
		if in.IsError() {
			return false, r.keep(errors.New(in.Error()))
		}
		x, a := native(in), newArgs(va)
		got, err := false, r.weigh(append(a.pos, x)...)
		if err == nil {
			got, err = t(x, a)
		}
		if err == nil {
			err = r.tick()
		}
		if err != nil {
			return false, r.keep(fmt.Errorf("test %q: %w", name, err))
		}
		return got, nil
	}
}

// describe says which filter failed, unless it is one of ours that no template names.
func describe(name string, err error) error {
	if strings.HasPrefix(name, internalPrefix) {
		return err
	}
	return fmt.Errorf("filter %q: %w", name, err)
}

// internalPrefix begins the names that a template cannot spell.
const internalPrefix = " "

// The filters that rewrite puts into the tree.
const (
	filterPrint = internalPrefix + "print"
	filterIter  = internalPrefix + "iterate"
	filterAttr  = internalPrefix + "attribute"
	filterItem  = internalPrefix + "item"
	filterNot   = internalPrefix + "not"
	filterNeg   = internalPrefix + "negative"
	filterList  = internalPrefix + "list"
	filterDict  = internalPrefix + "dict"
	filterSlice = internalPrefix + "slice"
	filterOp    = internalPrefix + "op" // followed by the operator
)

func internalFilters() map[string]filter {
	out := map[string]filter{
		filterPrint: func(r *render, in any, _ args) (any, error) { return r.print(in) },
		filterIter:  func(r *render, in any, _ args) (any, error) { return r.iterate(in) },
		filterAttr:  func(r *render, in any, a args) (any, error) { return r.attribute(in, text(a.at(0))) },
		filterItem:  func(r *render, in any, a args) (any, error) { return r.item(in, a.at(0)) },
		filterNot:   func(_ *render, in any, _ args) (any, error) { return !truth(in), nil },
		filterNeg:   func(_ *render, in any, _ args) (any, error) { return arithmetic("-", 0, in) },
		filterList:  func(_ *render, in any, _ args) (any, error) { return checked(in) },
		filterSlice: func(_ *render, in any, a args) (any, error) { return slice(in, a.at(0), a.at(1), a.at(2)) },
		filterDict: func(_ *render, in any, _ args) (any, error) {
			flat, _ := in.(List)
			if _, err := checked(in); err != nil {
				return nil, err
			}
			out := Dict{}
			for i := 0; i+1 < len(flat); i += 2 {
				out = out.set(flat[i], flat[i+1])
			}
			return out, nil
		},
	}
	for _, op := range []string{"==", "!=", "<", "<=", ">", ">=", "+", "-", "*", "/", "//", "%", "**", "~"} {
		out[filterOp+op] = func(r *render, in any, a args) (any, error) { return r.binary(op, in, a.at(0)) }
	}
	return out
}

// checked finds the error among the elements of a literal, which gonja does not look for.
func checked(in any) (any, error) {
	list, _ := in.(List)
	for _, v := range list {
		if err, ok := v.(error); ok {
			return nil, err
		}
	}
	return in, nil
}
