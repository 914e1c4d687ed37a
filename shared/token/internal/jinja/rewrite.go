package jinja

import (
	"fmt"

	controls "github.com/nikolalohinski/gonja/v2/builtins/control_structures"
	"github.com/nikolalohinski/gonja/v2/nodes"
	"github.com/nikolalohinski/gonja/v2/tokens"
)

// rewriteNodes replaces, in the syntax tree, every operator and access by a call of one of our filters, and everything
// that is printed by a call of filterPrint. What is left to gonja is names, calls, "and" and "or".
func rewriteNodes(list []nodes.Node) error {
	for i, n := range list {
		var err error
		if list[i], err = rewriteNode(n); err != nil {
			return err
		}
	}
	return nil
}

func rewriteNode(n nodes.Node) (nodes.Node, error) {
	switch n := n.(type) {
	case *nodes.Output:
		if n.Condition != nil {
			return nil, fmt.Errorf("line %d: unexpected condition", n.Start.Line)
		}
		e, err := rewrite(n.Expression)
		return printed(e, n.Start), err
	case *nodes.ControlStructureBlock:
		return n, rewriteControl(n.ControlStructure)
	}
	return n, nil // a comment, or nil at the end; prepare has left no text
}

func printed(e nodes.Expression, at *tokens.Token) *nodes.Output {
	return &nodes.Output{Start: at, End: at, Expression: call(e, filterPrint)}
}

func rewriteControl(c nodes.ControlStructure) error {
	switch c := c.(type) {
	case *controls.ForControlStructure:
		if c.Recursive {
			return fmt.Errorf("line %d: a recursive loop is not supported", c.Position().Line)
		}
		if err := rewriteAll(&c.ObjectEvaluator, &c.IfCondition); err != nil {
			return err
		}
		c.ObjectEvaluator = call(c.ObjectEvaluator, filterIter)
		// Printing nothing in each turn makes a loop with an empty body look at the clock.
		at := c.BodyWrapper.Location
		c.BodyWrapper.Nodes = append([]nodes.Node{&nodes.Output{Start: at, End: at, Expression: &nodes.String{Location: at}}}, c.BodyWrapper.Nodes...)
		return rewriteWrappers(c.BodyWrapper, c.EmptyWrapper)
	case *controls.IfControlStructure:
		for i := range c.Conditions {
			if err := rewriteAll(&c.Conditions[i]); err != nil {
				return err
			}
		}
		return rewriteWrappers(c.Wrappers...)
	case *macroTag:
		for _, p := range c.Kwargs {
			// A parameter without default has a None of gonja's there, and is undefined when it is not given.
			if none, ok := p.Value.(*nodes.None); ok && none.Location.Val != "None" {
				continue
			}
			if err := rewriteAll(&p.Value); err != nil {
				return err
			}
		}
		return rewriteWrappers(c.Wrapper)
	case *setTag:
		if err := rewriteAll(&c.value, &c.object); err != nil {
			return err
		}
		return rewriteWrappers(c.body)
	case *blockTag:
		return rewriteWrappers(c.body)
	}
	return nil
}

func rewriteWrappers(wrappers ...*nodes.Wrapper) error {
	for _, w := range wrappers {
		if w == nil {
			continue
		}
		if err := rewriteNodes(w.Nodes); err != nil {
			return err
		}
	}
	return nil
}

// rewriteAll rewrites expressions in place; nil ones stay.
func rewriteAll(list ...*nodes.Expression) error {
	for _, e := range list {
		if *e == nil {
			continue
		}
		var err error
		if *e, err = rewrite(*e); err != nil {
			return err
		}
	}
	return nil
}

func call(e nodes.Expression, name string, args ...nodes.Expression) nodes.Expression {
	return &nodes.FilteredExpression{
		Expression: e,
		Filters:    []*nodes.FilterCall{{Token: e.Position(), Name: name, Args: args}},
	}
}

func rewrite(e nodes.Expression) (nodes.Expression, error) {
	switch n := e.(type) {
	case *nodes.String, *nodes.Integer, *nodes.Float, *nodes.Bool, *nodes.Name:
		return e, nil
	case *nodes.None:
		return noneNode(n.Location), nil
	case *nodes.List:
		return call(n, filterList), rewriteSlice(n.Val)
	case *nodes.Tuple:
		return call(n, filterList), rewriteSlice(n.Val)
	case *nodes.Dict:
		return rewriteDict(n)
	case *nodes.Negation:
		err := rewriteAll(&n.Term)
		return call(n.Term, filterNot), err
	case *nodes.UnaryExpression:
		if err := rewriteAll(&n.Term); err != nil || !n.Negative {
			return n.Term, err
		}
		return call(n.Term, filterNeg), nil
	case *nodes.BinaryExpression:
		if err := rewriteAll(&n.Left, &n.Right); err != nil {
			return nil, err
		}
		if t := n.Operator.Token.Type; t == tokens.And || t == tokens.Or {
			return n, nil
		}
		return call(n.Left, filterOp+n.Operator.Token.Val, n.Right), nil
	case *nodes.FilteredExpression:
		for _, f := range n.Filters {
			if err := rewriteArgs(f.Args, f.Kwargs); err != nil {
				return nil, err
			}
		}
		return n, rewriteAll(&n.Expression)
	case *nodes.TestExpression:
		if err := rewriteArgs(n.Test.Args, n.Test.Kwargs); err != nil {
			return nil, err
		}
		return n, rewriteAll(&n.Expression)
	case *nodes.Call:
		if err := rewriteArgs(n.Args, n.Kwargs); err != nil {
			return nil, err
		}
		f, err := rewrite(n.Func)
		n.Func, n.Parent = f, nil // a method is a value that attribute returns
		return n, err
	}
	return rewriteAccess(e)
}

func rewriteAccess(e nodes.Expression) (nodes.Expression, error) {
	switch n := e.(type) {
	case *nodes.GetAttribute:
		x, err := rewrite(n.Node)
		if err != nil {
			return nil, err
		}
		if n.Attribute == "" {
			return call(x, filterItem, &nodes.Integer{Location: n.Location, Val: n.Index}), nil
		}
		return call(x, filterAttr, &nodes.String{Location: n.Location, Val: n.Attribute}), nil
	case *nodes.GetItem:
		if n.Arg == nil {
			return nil, fmt.Errorf("line %d: empty subscript", n.Location.Line)
		}
		x, err := rewrite(n.Node)
		if err != nil {
			return nil, err
		}
		key, err := rewrite(n.Arg)
		return call(x, filterItem, key), err
	case *nodes.GetSlice:
		x, err := rewrite(n.Node)
		if err != nil {
			return nil, err
		}
		bounds := []nodes.Expression{n.Start, n.End, n.Step}
		for i := range bounds {
			if bounds[i] == nil {
				bounds[i] = noneNode(n.Location)
			}
		}
		return call(x, filterSlice, bounds...), rewriteSlice(bounds)
	}
	return nil, fmt.Errorf("an expression of type %T is not supported", e)
}

// noneNode is the variable "none", which holds our None.
func noneNode(at *tokens.Token) nodes.Expression {
	return &nodes.Name{Name: &tokens.Token{Type: tokens.Name, Val: "none", Line: at.Line, Col: at.Col, Pos: at.Pos}}
}

func rewriteSlice(list []nodes.Expression) error {
	for i := range list {
		if err := rewriteAll(&list[i]); err != nil {
			return err
		}
	}
	return nil
}

func rewriteArgs(list []nodes.Expression, named map[string]nodes.Expression) error {
	for k, e := range named {
		out, err := rewrite(e)
		if err != nil {
			return err
		}
		named[k] = out
	}
	return rewriteSlice(list)
}

// rewriteDict makes a list of keys and values of it, which filterDict puts together.
func rewriteDict(n *nodes.Dict) (nodes.Expression, error) {
	flat := &nodes.List{Location: n.Token}
	for _, p := range n.Pairs {
		if err := rewriteAll(&p.Key, &p.Value); err != nil {
			return nil, err
		}
		flat.Val = append(flat.Val, p.Key, p.Value)
	}
	return call(flat, filterDict), nil
}
