package jinja

import (
	"fmt"
	"html"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

type filter func(r *render, in any, a args) (any, error)

// filters are the filters of jinja2 that chat templates use. Those that work on sequences are in sequence.go.
func filters() map[string]filter {
	return map[string]filter{
		"tojson": toJSON,
		"trim": func(_ *render, in any, a args) (any, error) {
			if err := a.names("chars"); err != nil {
				return nil, err
			}
			return strip(text(in), a.get("chars"), true, true)
		},
		"upper":      textFilter(strings.ToUpper),
		"lower":      textFilter(strings.ToLower),
		"title":      textFilter(title),
		"capitalize": textFilter(capitalize),
		"string":     textFilter(func(s string) string { return s }),
		"e":          textFilter(html.EscapeString),
		"escape":     textFilter(html.EscapeString),
		"safe":       func(_ *render, in any, a args) (any, error) { return in, a.names() },
		"replace":    func(r *render, in any, a args) (any, error) { return replace(r, text(in), a) },
		"indent":     indentFilter,
		"default":    defaultFilter,
		"d":          defaultFilter,
		"length":     lengthFilter,
		"count":      lengthFilter,
		"int":        intFilter,
		"float":      floatFilter,
		"abs":        absFilter,
		"round":      roundFilter,
		"first":      firstFilter,
		"last":       lastFilter,
		"list":       func(r *render, in any, a args) (any, error) { return iterateArgs(r, in, &a) },
		"items":      itemsFilter,
		"dictsort":   dictSortFilter,
		"join":       joinFilter,
		"reverse":    reverseFilter,
		"sort":       sortFilter,
		"unique":     uniqueFilter,
		"min":        extremeFilter(-1),
		"max":        extremeFilter(1),
		"sum":        sumFilter,
		"map":        mapFilter,
		"select":     selectFilter(true, false),
		"reject":     selectFilter(false, false),
		"selectattr": selectFilter(true, true),
		"rejectattr": selectFilter(false, true),
	}
}

func textFilter(f func(string) string) filter {
	return func(_ *render, in any, a args) (any, error) { return f(text(in)), a.names() }
}

func defaultFilter(_ *render, in any, a args) (any, error) {
	if err := a.names("default_value", "boolean"); err != nil {
		return nil, err
	}
	if in != nil && (truth(in) || !truth(a.get("boolean"))) {
		return in, nil
	}
	if v := a.get("default_value"); v != nil {
		return v, nil
	}
	return "", nil
}

func lengthFilter(_ *render, in any, a args) (any, error) {
	if err := a.names(); err != nil {
		return nil, err
	}
	switch x := in.(type) {
	case nil:
		return 0, nil
	case string:
		return utf8.RuneCountInString(x), nil
	case List:
		return len(x), nil
	case Dict:
		return len(x), nil
	}
	return nil, fmt.Errorf("a value of type %q has no length", kind(in))
}

func intFilter(_ *render, in any, a args) (any, error) {
	if err := a.names("default", "base"); err != nil {
		return nil, err
	}
	otherwise := a.get("default")
	if otherwise == nil {
		otherwise = 0
	}
	if n, ok := integer(in); ok {
		return n, nil
	}
	f, ok := in.(float64)
	if s, isText := in.(string); isText {
		s = strings.TrimSpace(s)
		if n, err := strconv.Atoi(s); err == nil {
			return n, nil
		}
		parsed, err := strconv.ParseFloat(s, 64)
		f, ok = parsed, err == nil
	}
	if !ok || math.Abs(f) >= 1<<63 || math.IsNaN(f) {
		return otherwise, nil
	}
	return int(f), nil
}

func floatFilter(_ *render, in any, a args) (any, error) {
	if err := a.names("default"); err != nil {
		return nil, err
	}
	if f, ok := number(in); ok {
		return f, nil
	}
	if s, ok := in.(string); ok {
		if f, err := strconv.ParseFloat(strings.TrimSpace(s), 64); err == nil {
			return f, nil
		}
	}
	if v := a.get("default"); v != nil {
		return v, nil
	}
	return 0.0, nil
}

func absFilter(_ *render, in any, a args) (any, error) {
	if n, ok := integer(in); ok {
		return max(n, -n), a.names()
	}
	if f, ok := number(in); ok {
		return math.Abs(f), a.names()
	}
	return nil, fmt.Errorf("wants a number, not %s", kind(in))
}

func roundFilter(_ *render, in any, a args) (any, error) {
	if err := a.names("precision", "method"); err != nil {
		return nil, err
	}
	f, ok := number(in)
	digits, err := a.int("precision", 0)
	method, err2 := a.str("method", "common")
	if !ok || err != nil || err2 != nil || digits < 0 || digits > 15 {
		return nil, fmt.Errorf("wants a number, a precision of 0 to 15 and a method")
	}
	scale := math.Pow10(digits)
	switch method {
	case "ceil":
		return math.Ceil(f*scale) / scale, nil
	case "floor":
		return math.Floor(f*scale) / scale, nil
	}
	return strconv.ParseFloat(strconv.FormatFloat(f, 'f', digits, 64), 64)
}

// indentFilter puts white space before each line, but for the first unless asked, and but for empty ones.
func indentFilter(r *render, in any, a args) (any, error) {
	if err := a.names("width", "first", "blank"); err != nil {
		return nil, err
	}
	by, isText := a.get("width").(string)
	if !isText {
		n, err := a.int("width", 4)
		if err != nil || n < 0 || n > 1000 {
			return nil, fmt.Errorf("width is not a string or a number of 0 to 1000")
		}
		by = strings.Repeat(" ", n)
	}
	s := text(in)
	if err := r.room(len(s) + product(len(by), 1+strings.Count(s, "\n"))); err != nil {
		return nil, err
	}
	lines := strings.Split(s, "\n")
	for i := range lines {
		if i == 0 && !truth(a.get("first")) || lines[i] == "" && i > 0 && !truth(a.get("blank")) {
			continue
		}
		lines[i] = by + lines[i]
	}
	return strings.Join(lines, "\n"), nil
}

func itemsFilter(_ *render, in any, a args) (any, error) {
	if in == nil {
		return List{}, a.names()
	}
	d, ok := in.(Dict)
	if !ok {
		return nil, fmt.Errorf("wants a mapping, not %s", kind(in))
	}
	return items(d), a.names()
}

func dictSortFilter(_ *render, in any, a args) (any, error) {
	if err := a.names("case_sensitive", "by", "reverse"); err != nil {
		return nil, err
	}
	d, ok := in.(Dict)
	if !ok {
		return nil, fmt.Errorf("wants a mapping, not %s", kind(in))
	}
	place := 0
	if by, _ := a.str("by", "key"); by == "value" {
		place = 1
	}
	key := func(x any) any { return fold(x.(List)[place], truth(a.get("case_sensitive"))) }
	return sorted(items(d), key, truth(a.get("reverse")))
}

// fold makes strings equal that differ in case only.
func fold(x any, caseSensitive bool) any {
	if s, ok := x.(string); ok && !caseSensitive {
		return strings.ToLower(s)
	}
	return x
}

// sorted returns a sorted copy; values without an order are an error.
func sorted(in List, key func(any) any, reverse bool) (any, error) {
	out := slices.Clone(in)
	var failed error
	slices.SortStableFunc(out, func(a, b any) int {
		c, err := compare(key(a), key(b))
		if err != nil {
			failed = err
		}
		if reverse {
			return -c
		}
		return c
	})
	return out, failed
}
