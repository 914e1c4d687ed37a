package jinja

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"sort"
	"strconv"
	"strings"
	"unicode/utf16"
)

// FromJSON reads one JSON value. The keys of objects keep their order.
func FromJSON(data []byte) (any, error) {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.UseNumber()
	v, err := decode(dec, 0)
	if err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("more follows the JSON value at byte %d", dec.InputOffset())
	}
	return v, nil
}

// maxJSONDepth keeps hostile nesting from deep recursion here and in everything that walks the value.
const maxJSONDepth = 200

func decode(dec *json.Decoder, depth int) (any, error) {
	if depth > maxJSONDepth {
		return nil, fmt.Errorf("nested more than %d deep at byte %d", maxJSONDepth, dec.InputOffset())
	}
	tok, err := dec.Token()
	if err != nil {
		return nil, err
	}
	switch tok := tok.(type) {
	case nil:
		return None{}, nil
	case json.Number:
		return jsonNumber(string(tok)), nil
	case json.Delim:
		if tok == '[' {
			return decodeList(dec, depth)
		}
		return decodeDict(dec, depth)
	}
	return tok, nil // string or bool
}

func decodeList(dec *json.Decoder, depth int) (any, error) {
	out := List{}
	for dec.More() {
		v, err := decode(dec, depth+1)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	_, err := dec.Token()
	return out, err
}

func decodeDict(dec *json.Decoder, depth int) (any, error) {
	out, places := Dict{}, map[string]int{}
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return nil, err
		}
		key, _ := tok.(string)
		v, err := decode(dec, depth+1)
		if err != nil {
			return nil, err
		}
		// Of a key that comes twice the last value counts, in the first place, as in Python.
		if i, ok := places[key]; ok {
			out[i].Value = v
			continue
		}
		places[key] = len(out)
		out = append(out, Pair{key, v})
	}
	_, err := dec.Token()
	return out, err
}

func jsonNumber(s string) any {
	if !strings.ContainsAny(s, ".eE") {
		if n, err := strconv.Atoi(s); err == nil {
			return n
		}
		if n, ok := new(big.Int).SetString(s, 10); ok && len(s) < 1000 {
			return n
		}
	}
	f, _ := strconv.ParseFloat(s, 64) // out of range: infinite, as in Python
	return f
}

// jsonStyle holds the arguments of json.dumps that templates use.
type jsonStyle struct {
	ascii    bool
	sortKeys bool
	item     string // between items
	colon    string // between key and value
	indent   string // per level, when lines are wanted
	lines    bool
}

// jsonWriter writes a value as json.dumps does.
type jsonWriter struct {
	jsonStyle
	b     strings.Builder
	limit int // bytes
}

func (w *jsonWriter) value(x any, depth int) error {
	if w.b.Len() > w.limit {
		return errTooLong
	}
	switch x := x.(type) {
	case None:
		w.b.WriteString("null")
	case bool:
		w.b.WriteString(strconv.FormatBool(x))
	case int, *big.Int:
		w.b.WriteString(repr(x))
	case float64:
		w.b.WriteString(strings.NewReplacer("inf", "Infinity", "nan", "NaN").Replace(reprFloat(x)))
	case string:
		w.str(x)
	case List:
		return w.list(x, depth)
	case Dict:
		return w.dict(x, depth)
	default:
		return fmt.Errorf("a value of type %s is not JSON serializable", kind(x))
	}
	return nil
}

func (w *jsonWriter) list(x List, depth int) error {
	if len(x) == 0 {
		w.b.WriteString("[]")
		return nil
	}
	w.b.WriteByte('[')
	for i, v := range x {
		if i > 0 {
			w.b.WriteString(w.item)
		}
		w.newline(depth + 1)
		if err := w.value(v, depth+1); err != nil {
			return err
		}
	}
	w.newline(depth)
	w.b.WriteByte(']')
	return nil
}

func (w *jsonWriter) dict(x Dict, depth int) error {
	if len(x) == 0 {
		w.b.WriteString("{}")
		return nil
	}
	if w.sortKeys {
		x = append(Dict(nil), x...)
		sort.SliceStable(x, func(i, j int) bool { return text(x[i].Key) < text(x[j].Key) })
	}
	w.b.WriteByte('{')
	for i, p := range x {
		if i > 0 {
			w.b.WriteString(w.item)
		}
		w.newline(depth + 1)
		w.str(text(p.Key))
		w.b.WriteString(w.colon)
		if err := w.value(p.Value, depth+1); err != nil {
			return err
		}
	}
	w.newline(depth)
	w.b.WriteByte('}')
	return nil
}

func (w *jsonWriter) newline(depth int) {
	if w.lines {
		w.b.WriteByte('\n')
		w.b.WriteString(strings.Repeat(w.indent, depth))
	}
}

func (w *jsonWriter) str(s string) {
	w.b.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			w.b.WriteByte('\\')
			w.b.WriteRune(r)
		case r == '\n':
			w.b.WriteString(`\n`)
		case r == '\r':
			w.b.WriteString(`\r`)
		case r == '\t':
			w.b.WriteString(`\t`)
		case r == '\b':
			w.b.WriteString(`\b`)
		case r == '\f':
			w.b.WriteString(`\f`)
		case r < ' ' || w.ascii && r > '~' && r < 0x10000:
			fmt.Fprintf(&w.b, `\u%04x`, r)
		case w.ascii && r > '~':
			hi, lo := utf16.EncodeRune(r)
			fmt.Fprintf(&w.b, `\u%04x\u%04x`, hi, lo)
		default:
			w.b.WriteRune(r)
		}
	}
	w.b.WriteByte('"')
}

// toJSON is Hugging Face's tojson filter.
func toJSON(r *render, in any, a args) (any, error) {
	if err := a.names("ensure_ascii", "indent", "separators", "sort_keys"); err != nil {
		return nil, err
	}
	style := jsonStyle{item: ", ", colon: ": ", ascii: truth(a.get("ensure_ascii")), sortKeys: truth(a.get("sort_keys"))}
	switch indent := a.get("indent").(type) {
	case int:
		if indent < 0 || indent > 64 {
			return nil, fmt.Errorf("tojson: indent %d is outside 0..64", indent)
		}
		style.lines, style.indent, style.item = true, strings.Repeat(" ", indent), ","
	case string:
		style.lines, style.indent, style.item = true, indent, ","
	}
	if sep, ok := a.get("separators").(List); ok && len(sep) == 2 {
		style.item, style.colon = text(sep[0]), text(sep[1])
	}
	w := jsonWriter{jsonStyle: style, limit: r.limits.Text}
	if err := w.value(in, 0); err != nil {
		return nil, err
	}
	return w.b.String(), nil
}
