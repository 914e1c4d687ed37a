package api

import (
	"bytes"

	"meridian.internal/shared/jsonline"
)

// Merged joins the logprobs objects of the chunks of one choice: arrays are concatenated, other members keep their last
// value, and null is as good as nothing. Bytes are copied as sent. The zero value is empty.
type Merged struct {
	keys   []string
	values [][]byte // arrays without brackets, or the value
	array  []bool
}

// Add takes one object; what is no object is ignored.
func (m *Merged) Add(obj []byte) {
	var arr [6]Field
	fields, err := SplitObject(arr[:0], obj)
	if err != nil {
		return
	}
	for _, f := range fields {
		i := m.find(string(f.Key))
		switch {
		case isNull(f.Value) && m.values[i] != nil:
			continue // it adds nothing
		case f.Value[0] == '[' && !m.array[i] && isNull(m.values[i]):
			m.values[i], m.array[i] = m.values[i][:0], true
		case f.Value[0] != '[' || !m.array[i]:
			m.values[i] = append(m.values[i][:0], f.Value...)
			m.array[i] = false
			continue
		case m.values[i] == nil:
			m.values[i] = []byte{}
		}
		inner := bytes.TrimSpace(f.Value[1 : len(f.Value)-1])
		if len(inner) == 0 {
			continue
		}
		if len(m.values[i]) > 0 {
			m.values[i] = append(m.values[i], ',')
		}
		m.values[i] = append(m.values[i], inner...)
	}
}

func (m *Merged) find(key string) int {
	for i, k := range m.keys {
		if k == key {
			return i
		}
	}
	m.keys = append(m.keys, key)
	m.values = append(m.values, nil)
	m.array = append(m.array, true)
	return len(m.keys) - 1
}

// Append appends the object, or null when nothing was added.
func (m *Merged) Append(dst []byte) []byte {
	if len(m.keys) == 0 {
		return append(dst, "null"...)
	}
	dst = append(dst, '{')
	for i, k := range m.keys {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(jsonline.AppendString(dst, k), ':')
		if m.array[i] {
			dst = append(append(append(dst, '['), m.values[i]...), ']')
			continue
		}
		dst = append(dst, m.values[i]...)
	}
	return append(dst, '}')
}
