package api

import "strings"

// setShape takes what asks for an answer that is more than text. It is forwarded as sent; a worker that cannot do it must
// refuse it, because an answer that ignores it looks right.
func (r *Request) setShape(key, v []byte) (bool, error) {
	switch string(key) {
	case "tool_choice":
		r.noTools = string(v) == `"none"`
		r.wantsTool = v[0] == '{' || string(v) == `"required"`
		if c := v[0]; c != '"' && c != '{' {
			return true, errorWant(`"none", "auto", "required" or an object that names a function`)
		}
	case "response_format":
		return true, r.setFormat(v)
	case "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend":
		r.need(string(key))
	default:
		return false, nil
	}
	return true, nil
}

func (r *Request) setFormat(v []byte) error {
	const want = errorWant(`an object with a type: "text", "json_object" or "json_schema"`)
	fields, err := splitOnce("response_format", v, want)
	if err != nil {
		return err
	}
	for _, f := range fields {
		if string(f.Key) == "type" {
			kind, err := decodeString(f.Value)
			if err != nil || kind == "" {
				return want
			}
			if kind != "text" {
				r.need("response_format")
			}
			return nil
		}
	}
	return want
}

func (r *Request) need(field string) {
	if r.Needs == "" {
		r.Needs = field
	}
}

// CheckPlain is for workers that produce text alone: it refuses what they would silently ignore.
func (r *Request) CheckPlain() *Error {
	switch {
	case r.Tools != nil:
		return Invalid("tools", `the workers of model %q do not call tools; leave tools out, or set tool_choice to "none"`, r.Model)
	case r.Needs != "":
		return Invalid(r.Needs, "the workers of model %q do not constrain their output; leave %s out", r.Model, r.Needs)
	}
	return nil
}

// checkMedia refuses content parts that a worker would have to fetch: a client chose the address.
func checkMedia(messages []byte) *Error {
	i := -1
	var bad *Error
	_ = eachElement(messages, func(message []byte) bool { // messages were validated by setMessages
		i++
		fields, _ := SplitObject(nil, message)
		for _, f := range fields {
			if string(f.Key) == "content" && f.Value[0] == '[' && fetches(f.Value, 0) {
				name := "messages[" + itoa(i) + "].content"
				bad = Invalid(name, `%s: media is taken as "data:" URLs only, in parts that nest %d deep at most; nothing is fetched from an address`, name, maxParts)
			}
		}
		return bad == nil
	})
	return bad
}

// maxParts is how deep content parts may nest; OpenAI's need three levels.
const maxParts = 8

// fetches tells whether a value names an address anywhere: a string under a key that is or ends with url, that is no data: URL.
func fetches(v []byte, depth int) bool {
	found := false
	switch {
	case depth > maxParts: // each level costs a pass over what is below it
		return true
	case v[0] == '[':
		_ = eachElement(v, func(elem []byte) bool { found = fetches(elem, depth+1); return !found })
	case v[0] == '{':
		fields, err := SplitObject(nil, v)
		if err != nil {
			return true // more members than are looked at
		}
		for _, f := range fields {
			if strings.HasSuffix(strings.ToLower(string(f.Key)), "url") && f.Value[0] == '"' {
				s, err := decodeString(f.Value)
				if err != nil || len(s) < 5 || !strings.EqualFold(s[:5], "data:") {
					return true
				}
			}
			if fetches(f.Value, depth+1) {
				return true
			}
		}
	}
	return found
}
