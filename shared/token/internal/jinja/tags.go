package jinja

import (
	"errors"
	"fmt"
	"strings"

	"github.com/nikolalohinski/gonja/v2/builtins"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/nodes"
	"github.com/nikolalohinski/gonja/v2/parser"
	"github.com/nikolalohinski/gonja/v2/tokens"

	controls "github.com/nikolalohinski/gonja/v2/builtins/control_structures"
)

// tags are the statements that a template may use. Those that read other templates (include, import, extends) are not
// among them; set and macro are ours.
func tags() (*exec.ControlStructureSet, error) {
	out := map[string]parser.ControlStructureParser{
		"set": parseSet, "macro": parseMacro, "generation": parseBlock,
	}
	for _, name := range []string{"for", "if", "break", "continue"} {
		p, ok := builtins.ControlStructures.Get(name)
		if !ok {
			return nil, fmt.Errorf("gonja has no statement %q", name)
		}
		out[name] = p
	}
	return exec.NewControlStructureSet(out), nil
}

// setTag is {% set x = … %}, {% set ns.x = … %} and {% set x %}…{% endset %}.
type setTag struct {
	at     *tokens.Token
	name   string           // the variable, or the attribute
	object nodes.Expression // of which it is an attribute, else nil
	value  nodes.Expression // nil in the block form
	body   *nodes.Wrapper
}

func (t *setTag) Position() *tokens.Token { return t.at }
func (t *setTag) String() string          { return "set " + t.name }

func parseSet(p, a *parser.Parser) (nodes.ControlStructure, error) {
	t := &setTag{at: p.Current()}
	target, err := a.ParseVariableOrLiteral()
	if err != nil {
		return nil, err
	}
	switch n := target.(type) {
	case *nodes.Name:
		t.name = n.Name.Val
	case *nodes.GetAttribute:
		t.name, t.object = n.Attribute, n.Node
	default:
		return nil, a.Error("set wants a variable or an attribute of a namespace", a.Current())
	}
	if a.Match(tokens.Assign) != nil {
		if t.value, err = a.ParseExpression(); err != nil {
			return nil, err
		}
		if !a.End() || t.value == nil {
			return nil, a.Error("malformed set", a.Current())
		}
		return t, nil
	}
	if !a.End() {
		return nil, a.Error("set wants = or nothing after the variable", a.Current())
	}
	t.body, _, err = p.WrapUntil("endset")
	return t, err
}

// Execute implements gonja's interface.
func (t *setTag) Execute(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
	var value any
	if t.body != nil {
		var b strings.Builder
		sub := r.Inherit()
		sub.Output = &b
		if err := sub.ExecuteWrapper(t.body); err != nil {
			return err
		}
		value = b.String()
	} else {
		v := r.Eval(t.value)
		if v.IsError() {
			return v
		}
		value = native(v)
	}
	if t.object == nil {
		r.Environment.Context.Set(t.name, value)
		return nil
	}
	object := r.Eval(t.object)
	if object.IsError() {
		return object
	}
	ns, ok := native(object).(*namespace)
	if !ok {
		return fmt.Errorf("cannot assign attribute %q: only a namespace takes it", t.name)
	}
	ns.vars = ns.vars.set(t.name, value)
	return nil
}

// macroTag is gonja's macro with a limit on macros that call each other.
type macroTag struct {
	*controls.MacroControlStructure
}

func parseMacro(p, a *parser.Parser) (nodes.ControlStructure, error) {
	parse, ok := builtins.ControlStructures.Get("macro")
	if !ok {
		return nil, errors.New("gonja has no statement macro")
	}
	c, err := parse(p, a)
	if err != nil {
		return nil, err
	}
	macro, ok := c.(*controls.MacroControlStructure)
	if !ok {
		return nil, fmt.Errorf("gonja's macro is a %T", c)
	}
	return &macroTag{macro}, nil
}

// maxMacroDepth bounds the stack.
const maxMacroDepth = 100

// Execute implements gonja's interface.
func (t *macroTag) Execute(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
	macro, err := exec.MacroNodeToFunc(t.Macro, r)
	if err != nil {
		return err
	}
	state, _ := r.Environment.Context.Get(stateName)
	st, ok := state.(*render)
	if !ok {
		return errors.New("the renderer has lost its state")
	}
	r.Environment.Context.Set(t.Name, func(va *exec.VarArgs) (any, error) {
		st.depth++
		defer func() { st.depth-- }()
		if st.depth > maxMacroDepth {
			return nil, st.keep(errTooDeep)
		}
		for i, v := range va.Args {
			va.Args[i] = exec.AsValue(native(v))
		}
		out := macro(va)
		if out.IsError() {
			return nil, st.keep(errors.New(out.Error()))
		}
		return out.String(), nil
	})
	return nil
}

// blockTag is {% generation %}: it marks what an assistant wrote, for training, and prints its content.
type blockTag struct {
	at   *tokens.Token
	body *nodes.Wrapper
}

func (t *blockTag) Position() *tokens.Token { return t.at }
func (t *blockTag) String() string          { return "generation" }

func parseBlock(p, _ *parser.Parser) (nodes.ControlStructure, error) {
	t := &blockTag{at: p.Current()}
	var err error
	t.body, _, err = p.WrapUntil("endgeneration")
	return t, err
}

// Execute implements gonja's interface.
func (t *blockTag) Execute(r *exec.Renderer, _ *nodes.ControlStructureBlock) error {
	return r.ExecuteIfWrapper(t.body)
}
