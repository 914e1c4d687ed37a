package token

import (
	"encoding/json"
	"fmt"
	"math"
)

// Config is what tokenizer_config.json says, as far as serving needs it. A special token that the file does not have is
// the empty string, which no token can be.
type Config struct {
	BOSToken string
	EOSToken string
	PadToken string
	UnkToken string
	SepToken string
	ClsToken string
	// AddBOSToken and AddEOSToken are nil where the file does not say; tokenizer.json decides then, as it does for the
	// ids that Encode adds.
	AddBOSToken *bool
	AddEOSToken *bool
	// ModelMaxLength is the longest sequence in tokens; nil where the file has none, or the huge number that means so.
	ModelMaxLength *int64
	// ChatTemplates are the chat templates by name; a single one is named "default". A folder may hold the template in
	// chat_template.jinja instead; the caller puts it here then.
	ChatTemplates map[string]string
}

// DefaultTemplate is the name of the template for ordinary requests, ToolTemplate of the one for requests with tools.
const (
	DefaultTemplate = "default"
	ToolTemplate    = "tool_use"
)

// specialToken is a token as text or as an object with its content.
type specialToken string

// UnmarshalJSON reads all forms; null is the empty string.
func (s *specialToken) UnmarshalJSON(data []byte) error {
	var text *string
	if json.Unmarshal(data, &text) == nil {
		if text != nil {
			*s = specialToken(*text)
		}
		return nil
	}
	var object struct {
		Content *string `json:"content"`
	}
	if err := json.Unmarshal(data, &object); err != nil || object.Content == nil {
		return fmt.Errorf("a special token is %.60s; want a string, null or an object with content", data)
	}
	*s = specialToken(*object.Content)
	return nil
}

// ParseConfig reads a tokenizer_config.json.
func ParseConfig(tokenizerConfigJSON []byte) (*Config, error) {
	var f struct {
		BOS            specialToken    `json:"bos_token"`
		EOS            specialToken    `json:"eos_token"`
		Pad            specialToken    `json:"pad_token"`
		Unk            specialToken    `json:"unk_token"`
		Sep            specialToken    `json:"sep_token"`
		Cls            specialToken    `json:"cls_token"`
		AddBOS         *bool           `json:"add_bos_token"`
		AddEOS         *bool           `json:"add_eos_token"`
		ModelMaxLength *float64        `json:"model_max_length"`
		ChatTemplate   json.RawMessage `json:"chat_template"`
	}
	if err := json.Unmarshal(tokenizerConfigJSON, &f); err != nil {
		return nil, fmt.Errorf("token: parse tokenizer_config.json: %w", err)
	}
	c := &Config{
		BOSToken: string(f.BOS), EOSToken: string(f.EOS), PadToken: string(f.Pad), UnkToken: string(f.Unk),
		SepToken: string(f.Sep), ClsToken: string(f.Cls), AddBOSToken: f.AddBOS, AddEOSToken: f.AddEOS,
	}
	if n := f.ModelMaxLength; n != nil && *n < math.MaxInt32 {
		if *n < 1 || *n != math.Trunc(*n) {
			return nil, fmt.Errorf("token: tokenizer_config.json: model_max_length is %v; want a whole number above 0", *n)
		}
		length := int64(*n)
		c.ModelMaxLength = &length
	}
	var err error
	c.ChatTemplates, err = parseTemplates(f.ChatTemplate)
	return c, err
}

// parseTemplates reads "chat_template": a text, or a list of named texts.
func parseTemplates(raw json.RawMessage) (map[string]string, error) {
	if isNull(raw) {
		return nil, nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		return map[string]string{DefaultTemplate: text}, nil
	}
	var named []struct {
		Name     string `json:"name"`
		Template string `json:"template"`
	}
	if err := json.Unmarshal(raw, &named); err != nil {
		return nil, fmt.Errorf("token: tokenizer_config.json: chat_template is neither a text nor a list of named texts: %w", err)
	}
	out := map[string]string{}
	for i, n := range named {
		if _, twice := out[n.Name]; twice || n.Name == "" {
			return nil, fmt.Errorf("token: tokenizer_config.json: chat_template[%d].name %q is empty or there twice", i, n.Name)
		}
		out[n.Name] = n.Template
	}
	return out, nil
}
