package token

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"meridian.internal/shared/token/internal/jinja"
)

// contentExpr matches how templates name the content of a message.
const contentExpr = `(?:\bcontent\b|\[\s*['"]content['"]\s*\])`

// handlesParts reports whether a template loops over the content of messages, which says that it takes a list of parts.
// Reading the source is a guess, but the one that other servers make as well.
func handlesParts(source string) bool {
	return regexp.MustCompile(`\bfor\s+\w+\s+in\s+(?:\w+\.)?\w*` + contentExpr).MatchString(source)
}

// handlesNull reports whether a template asks whether content is none.
func handlesNull(source string) bool {
	return regexp.MustCompile(contentExpr + `\s+is\s+(?:not\s+)?[nN]one\b`).MatchString(source)
}

// messages reads the messages of a request and adapts them to the template.
func (c *chatTemplate) messages(raw json.RawMessage) (jinja.List, error) {
	v, err := jinja.FromJSON(raw)
	if err != nil {
		return nil, &InputError{"messages", err}
	}
	list, ok := v.(jinja.List)
	if !ok {
		return nil, &InputError{"messages", errors.New("not an array")}
	}
	for i := range list {
		m, ok := list[i].(jinja.Dict)
		if !ok {
			return nil, &InputError{"messages", fmt.Errorf("message %d is not an object", i)}
		}
		if list[i], err = c.message(m); err != nil {
			return nil, &InputError{"messages", fmt.Errorf("message %d: %w", i, err)}
		}
	}
	return list, nil
}

// message adapts one message; the Dict is ours and may change.
func (c *chatTemplate) message(m jinja.Dict) (jinja.Dict, error) {
	hasContent := false
	for i, p := range m {
		switch p.Key {
		case "content":
			hasContent = true
			content, err := c.content(p.Value)
			if err != nil {
				return nil, err
			}
			m[i].Value = content
		case "tool_calls":
			parseArguments(p.Value)
		}
	}
	if !hasContent && !c.null {
		m = append(m, jinja.Pair{Key: "content", Value: ""})
	}
	return m, nil
}

func (c *chatTemplate) content(v any) (any, error) {
	switch v := v.(type) {
	case jinja.None:
		if !c.null {
			return "", nil
		}
	case jinja.List:
		if !c.parts {
			return joinParts(v)
		}
	}
	return v, nil
}

// joinParts makes one text of text parts.
func joinParts(parts jinja.List) (string, error) {
	texts := make([]string, len(parts))
	for i, p := range parts {
		switch p := p.(type) {
		case string:
			texts[i] = p
			continue
		case jinja.Dict:
			if text, ok := p.Get("text"); ok {
				if texts[i], ok = text.(string); ok {
					continue
				}
			}
		}
		return "", fmt.Errorf("content part %d is not text, and the model takes nothing else", i)
	}
	return strings.Join(texts, "\n"), nil
}

// parseArguments turns the arguments of tool calls into objects, in place. What is no object as JSON stays text.
func parseArguments(calls any) {
	list, _ := calls.(jinja.List)
	for _, call := range list {
		d, _ := call.(jinja.Dict)
		function, _ := d.Get("function")
		f, _ := function.(jinja.Dict)
		for i, p := range f {
			text, ok := p.Value.(string)
			if p.Key != "arguments" || !ok {
				continue
			}
			if v, err := jinja.FromJSON([]byte(text)); err == nil {
				if args, ok := v.(jinja.Dict); ok {
					f[i].Value = args
				}
			} else if strings.TrimSpace(text) == "" {
				f[i].Value = jinja.Dict{}
			}
		}
	}
}
