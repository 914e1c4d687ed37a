package jinja

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

type stringMethod func(r *render, s string, a args) (any, error)

// stringMethods are the methods of Python's str that chat templates use.
func stringMethods() map[string]stringMethod {
	return map[string]stringMethod{
		"strip":        stripMethod(true, true),
		"lstrip":       stripMethod(true, false),
		"rstrip":       stripMethod(false, true),
		"split":        splitMethod(false),
		"rsplit":       splitMethod(true),
		"splitlines":   func(_ *render, s string, a args) (any, error) { return splitLines(s), a.names("keepends") },
		"startswith":   affixMethod(strings.HasPrefix),
		"endswith":     affixMethod(strings.HasSuffix),
		"removeprefix": trimMethod(strings.TrimPrefix),
		"removesuffix": trimMethod(strings.TrimSuffix),
		"upper":        caseMethod(strings.ToUpper),
		"lower":        caseMethod(strings.ToLower),
		"title":        caseMethod(title),
		"capitalize":   caseMethod(capitalize),
		"isdigit":      classMethod(unicode.IsDigit),
		"isnumeric":    classMethod(unicode.IsNumber),
		"isalpha":      classMethod(unicode.IsLetter),
		"isspace":      classMethod(isSpace),
		"isalnum":      classMethod(func(r rune) bool { return unicode.IsLetter(r) || unicode.IsNumber(r) }),
		"isupper": func(_ *render, s string, a args) (any, error) {
			return strings.ToUpper(s) == s && strings.ToLower(s) != s, a.names()
		},
		"islower": func(_ *render, s string, a args) (any, error) {
			return strings.ToLower(s) == s && strings.ToUpper(s) != s, a.names()
		},
		"replace": replace,
		"join": func(r *render, s string, a args) (any, error) {
			if err := a.names("iterable"); err != nil {
				return nil, err
			}
			return r.joinStrings(a.get("iterable"), s)
		},
		"find":  findMethod(strings.Index),
		"rfind": findMethod(strings.LastIndex),
		"count": func(_ *render, s string, a args) (any, error) {
			sub, ok := a.at(0).(string)
			if !ok {
				return nil, fmt.Errorf("wants a string, not %s", kind(a.at(0)))
			}
			return strings.Count(s, sub), nil
		},
	}
}

// isSpace is Python's str.isspace: Unicode's white space and four control characters.
func isSpace(r rune) bool { return unicode.IsSpace(r) || r >= 0x1C && r <= 0x1F }

// strip removes characters of a set, white space when there is none, from one or both ends.
func strip(s string, chars any, left, right bool) (string, error) {
	in := isSpace
	switch c := chars.(type) {
	case nil, None:
	case string:
		in = func(r rune) bool { return strings.ContainsRune(c, r) }
	default:
		return "", fmt.Errorf("wants a string, not %s", kind(chars))
	}
	if left {
		s = strings.TrimLeftFunc(s, in)
	}
	if right {
		s = strings.TrimRightFunc(s, in)
	}
	return s, nil
}

func stripMethod(left, right bool) stringMethod {
	return func(_ *render, s string, a args) (any, error) {
		if err := a.names("chars"); err != nil {
			return nil, err
		}
		return strip(s, a.get("chars"), left, right)
	}
}

func splitMethod(fromRight bool) stringMethod {
	return func(r *render, s string, a args) (any, error) {
		if err := a.names("sep", "maxsplit"); err != nil {
			return nil, err
		}
		limit, err := a.int("maxsplit", -1)
		if err != nil {
			return nil, err
		}
		sep, err := a.str("sep", "")
		if err != nil {
			return nil, err
		}
		if err := r.room(16 * (1 + len(s))); err != nil {
			return nil, err
		}
		switch v := a.get("sep").(type) {
		case string:
			if v == "" {
				return nil, fmt.Errorf("empty separator")
			}
		default:
			return splitSpace(s, limit, fromRight), nil
		}
		return splitSep(s, sep, limit, fromRight), nil
	}
}

func splitSep(s, sep string, limit int, fromRight bool) List {
	out := List{}
	for limit != 0 {
		i := strings.Index(s, sep)
		if fromRight {
			i = strings.LastIndex(s, sep)
		}
		if i < 0 {
			break
		}
		if fromRight {
			out, s = append(out, s[i+len(sep):]), s[:i]
		} else {
			out, s = append(out, s[:i]), s[i+len(sep):]
		}
		limit--
	}
	out = append(out, s)
	if fromRight {
		slices.Reverse(out)
	}
	return out
}

func splitSpace(s string, limit int, fromRight bool) List {
	out := List{}
	for {
		if fromRight {
			s = strings.TrimRightFunc(s, isSpace)
		} else {
			s = strings.TrimLeftFunc(s, isSpace)
		}
		if s == "" {
			break
		}
		i := strings.IndexFunc(s, isSpace)
		if fromRight {
			i = strings.LastIndexFunc(s, isSpace)
		}
		if i < 0 || limit == 0 {
			out = append(out, s)
			break
		}
		if fromRight {
			_, n := utf8.DecodeRuneInString(s[i:])
			out, s = append(out, s[i+n:]), s[:i]
		} else {
			out, s = append(out, s[:i]), s[i:]
		}
		limit--
	}
	if fromRight {
		slices.Reverse(out)
	}
	return out
}

func splitLines(s string) List {
	out := List{}
	s = strings.ReplaceAll(strings.ReplaceAll(s, "\r\n", "\n"), "\r", "\n")
	for line := range strings.SplitSeq(strings.TrimSuffix(s, "\n"), "\n") {
		if s != "" {
			out = append(out, line)
		}
	}
	return out
}

// affixMethod is startswith or endswith, of one string or of any in a tuple.
func affixMethod(has func(s, affix string) bool) stringMethod {
	return func(_ *render, s string, a args) (any, error) {
		switch x := a.at(0).(type) {
		case string:
			return has(s, x), nil
		case List:
			for _, v := range x {
				if affix, ok := v.(string); ok && has(s, affix) {
					return true, nil
				}
			}
			return false, nil
		default:
			return nil, fmt.Errorf("wants a string or a tuple of strings, not %s", kind(x))
		}
	}
}

func trimMethod(f func(s, affix string) string) stringMethod {
	return func(_ *render, s string, a args) (any, error) {
		affix, ok := a.at(0).(string)
		if !ok {
			return nil, fmt.Errorf("wants a string, not %s", kind(a.at(0)))
		}
		return f(s, affix), nil
	}
}

func caseMethod(f func(string) string) stringMethod {
	return func(_ *render, s string, a args) (any, error) { return f(s), a.names() }
}

func classMethod(in func(rune) bool) stringMethod {
	return func(_ *render, s string, a args) (any, error) {
		return s != "" && strings.IndexFunc(s, func(r rune) bool { return !in(r) }) < 0, a.names()
	}
}

func findMethod(f func(s, sub string) int) stringMethod {
	return func(_ *render, s string, a args) (any, error) {
		sub, ok := a.at(0).(string)
		if !ok || len(a.pos) != 1 {
			return nil, fmt.Errorf("wants one string")
		}
		i := f(s, sub)
		if i > 0 {
			i = utf8.RuneCountInString(s[:i])
		}
		return i, nil
	}
}

func replace(r *render, s string, a args) (any, error) {
	if err := a.names("old", "new", "count"); err != nil {
		return nil, err
	}
	from, ok1 := a.get("old").(string)
	to, ok2 := a.get("new").(string)
	count, err := a.int("count", -1)
	if err != nil || !ok1 || !ok2 {
		return nil, fmt.Errorf("wants two strings and a count")
	}
	if err := r.room(len(s) + product(strings.Count(s, from), len(to))); err != nil {
		return nil, err
	}
	return strings.Replace(s, from, to, count), nil
}

// joinStrings is sep.join(list) and the join filter.
func (r *render) joinStrings(in any, sep string) (any, error) {
	list, err := r.iterate(in)
	if err != nil {
		return nil, err
	}
	parts := make([]string, len(list))
	size := product(len(sep), len(list))
	for i, v := range list {
		parts[i] = text(v)
		size += len(parts[i])
	}
	if err := r.room(size); err != nil {
		return nil, err
	}
	return strings.Join(parts, sep), nil
}

func title(s string) string {
	inWord := false
	return strings.Map(func(r rune) rune {
		was := inWord
		inWord = unicode.IsLetter(r)
		if was {
			return unicode.ToLower(r)
		}
		return unicode.ToTitle(r)
	}, s)
}

func capitalize(s string) string {
	_, n := utf8.DecodeRuneInString(s)
	return strings.ToUpper(s[:n]) + strings.ToLower(s[n:])
}
