package jinja

import (
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/loaders"
)

// loaderInterface is gonja's interface, whose Inherit returns itself.
type loaderInterface = loaders.Loader

// maxRange is the limit of jinja2's sandbox.
const maxRange = 100_000

func (r *render) rangeFunction(a args) (any, error) {
	var n [3]int
	for i, v := range a.pos {
		k, ok := integer(v)
		if !ok || i > 2 {
			return nil, fmt.Errorf("wants up to three integers")
		}
		n[i] = k
	}
	start, stop, step := n[0], n[1], n[2]
	switch len(a.pos) {
	case 0:
		return nil, fmt.Errorf("wants up to three integers")
	case 1:
		start, stop, step = 0, n[0], 1
	case 2:
		step = 1
	}
	if step == 0 {
		return nil, fmt.Errorf("step is zero")
	}
	out := List{}
	for i := start; step > 0 && i < stop || step < 0 && i > stop; i += step {
		if len(out) == maxRange {
			return nil, fmt.Errorf("more than %d numbers", maxRange)
		}
		out = append(out, i)
		if step > 0 && i > stop-step || step < 0 && i < stop-step {
			break // the next step would be outside, or overflow
		}
	}
	return out, nil
}

func newNamespace(a args) (any, error) {
	d, err := newDict(a)
	if err != nil {
		return nil, err
	}
	return &namespace{vars: d.(Dict)}, nil
}

func newDict(a args) (any, error) {
	out := Dict{}
	if len(a.pos) > 1 {
		return nil, fmt.Errorf("wants at most one mapping")
	}
	if len(a.pos) == 1 {
		d, ok := a.pos[0].(Dict)
		if !ok {
			return nil, fmt.Errorf("wants a mapping, not %s", kind(a.pos[0]))
		}
		out = append(out, d...)
	}
	// gonja loses the order of keyword arguments; the order of their names is at least the same each time.
	names := make([]string, 0, len(a.kw))
	for name := range a.kw {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		out = out.set(name, a.kw[name])
	}
	return out, nil
}

func raise(a args) (any, error) {
	return nil, &RaisedError{Message: text(a.at(0))}
}

// strftime formats a date as C does in its own locale; what is no conversion stays as it is.
func strftime(t time.Time, format string) string {
	layouts := map[byte]string{
		'a': "Mon", 'A': "Monday", 'b': "Jan", 'B': "January", 'h': "Jan", 'd': "02", 'e': "_2", 'm': "01", 'y': "06",
		'Y': "2006", 'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'z': "-0700", 'Z': "MST", 'j': "002",
		'F': "2006-01-02", 'T': "15:04:05", 'D': "01/02/06", 'R': "15:04", 'c': "Mon Jan _2 15:04:05 2006",
		'x': "01/02/06", 'X': "15:04:05",
	}
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' || i+1 == len(format) {
			b.WriteByte(format[i])
			continue
		}
		start := i
		i++
		c := format[i]
		// "%-d" is "%d" without the zero in front.
		plain := c == '-' && i+1 < len(format)
		if plain {
			i++
			c = format[i]
		}
		switch layout, ok := layouts[c]; {
		case ok && plain:
			b.WriteString(unpadded(t.Format(layout)))
		case ok:
			b.WriteString(t.Format(layout))
		case c == '%':
			b.WriteByte('%')
		case c == 'f':
			fmt.Fprintf(&b, "%06d", t.Nanosecond()/1000)
		default:
			b.WriteString(format[start : i+1])
		}
	}
	return b.String()
}

// unpadded removes leading zeros and spaces, but for the last digit.
func unpadded(s string) string {
	for len(s) > 1 && (s[0] == '0' || s[0] == ' ') {
		s = s[1:]
	}
	return s
}
