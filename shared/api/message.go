package api

import "meridian.internal/shared/jsonline"

// Message joins the deltas of one chat choice: what they say beside role and content. Strings (reasoning_content, refusal)
// are joined, tool calls are merged by their index, any other member keeps its last value. Strings stay escaped as they
// came. The zero value is empty.
type Message struct {
	members []member
	calls   []toolCall
}

type member struct {
	key  string
	text bool // value is the inside of a string
	val  []byte
}

// toolCall is one call with the members of its deltas.
type toolCall struct {
	index    int64
	own      []member
	function []member
}

const (
	maxCalls   = 256
	maxMembers = 64
)

// Add takes one delta; what is no object is ignored.
func (m *Message) Add(delta []byte) {
	var arr [8]Field
	fields, err := SplitObject(arr[:0], delta)
	if err != nil {
		return
	}
	for _, f := range fields {
		switch string(f.Key) {
		case "role", "content":
		case "tool_calls":
			if f.Value[0] == '[' {
				_ = eachElement(f.Value, func(elem []byte) bool { m.addCall(elem); return true }) // validated above
			}
		default:
			m.members = join(m.members, f)
		}
	}
}

func (m *Message) addCall(elem []byte) {
	var arr [8]Field
	fields, err := SplitObject(arr[:0], elem)
	if err != nil {
		return
	}
	index := int64(len(m.calls)) // a worker that names none sends whole calls
	for _, f := range fields {
		if string(f.Key) == "index" {
			if n, err := decodeInt(f.Value, 0, maxCalls-1); err == nil {
				index = n
			}
		}
	}
	c := m.call(index)
	if c == nil {
		return
	}
	for _, f := range fields {
		switch string(f.Key) {
		case "index":
		case "function":
			var in [8]Field
			parts, _ := SplitObject(in[:0], f.Value) // null: nothing is added
			for _, p := range parts {
				c.function = join(c.function, p)
			}
		case "id", "type": // some workers repeat them
			c.own = replaceMember(c.own, f)
		default:
			c.own = join(c.own, f)
		}
	}
}

func (m *Message) call(index int64) *toolCall {
	for i := range m.calls {
		if m.calls[i].index == index {
			return &m.calls[i]
		}
	}
	if len(m.calls) >= maxCalls {
		return nil
	}
	m.calls = append(m.calls, toolCall{index: index})
	return &m.calls[len(m.calls)-1]
}

func find(list []member, key []byte) *member {
	for i := range list {
		if list[i].key == string(key) {
			return &list[i]
		}
	}
	return nil
}

// join appends a string to what was there under its key; any other value replaces it.
func join(list []member, f Field) []member {
	if isNull(f.Value) {
		return list
	}
	if inner := stringInside(f.Value); inner != nil {
		if old := find(list, f.Key); old != nil && old.text {
			old.val = append(old.val, inner...)
			return list
		}
	}
	return replaceMember(list, f)
}

func replaceMember(list []member, f Field) []member {
	if isNull(f.Value) {
		return list
	}
	next := member{key: string(f.Key)}
	if inner := stringInside(f.Value); inner != nil {
		next.text, next.val = true, append([]byte{}, inner...)
	} else {
		next.val = append([]byte{}, f.Value...)
	}
	if old := find(list, f.Key); old != nil {
		*old = next
		return list
	}
	if len(list) >= maxMembers {
		return list
	}
	return append(list, next)
}

func (m *Message) hasCalls() bool { return m != nil && len(m.calls) > 0 }

// appendMembers appends ,"key":value for each member.
func (m *Message) appendMembers(dst []byte) []byte {
	if m == nil {
		return dst
	}
	for _, x := range m.members {
		dst = x.append(append(dst, ','))
	}
	if len(m.calls) == 0 {
		return dst
	}
	dst = append(dst, `,"tool_calls":[`...)
	for i, c := range m.calls {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, '{')
		for _, x := range c.own {
			dst = append(x.append(dst), ',')
		}
		dst = append(dst, `"function":{`...)
		for j, x := range c.function {
			if j > 0 {
				dst = append(dst, ',')
			}
			dst = x.append(dst)
		}
		dst = append(dst, '}', '}')
	}
	return append(dst, ']')
}

func (x member) append(dst []byte) []byte {
	dst = append(jsonline.AppendString(dst, x.key), ':')
	if x.text {
		return append(append(append(dst, '"'), x.val...), '"')
	}
	return append(dst, x.val...)
}
