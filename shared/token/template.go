package token

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"meridian.internal/shared/token/internal/jinja"
)

// ErrNoTemplate is returned when the checkpoint has no chat template.
var ErrNoTemplate = errors.New("token: the model has no chat template")

// RaisedError is returned when the chat template refused the conversation with raise_exception. Its text is the
// template's, meant for the client.
type RaisedError = jinja.RaisedError

// InputError is returned when the messages, the tools or the arguments are not what a chat template takes.
type InputError struct {
	Field string // "messages", "tools" or "chat_template_kwargs"
	Err   error
}

func (e *InputError) Error() string { return fmt.Sprintf("token: %s: %v", e.Field, e.Err) }

// Unwrap returns the cause.
func (e *InputError) Unwrap() error { return e.Err }

// renderTime bounds a rendering whose context has no earlier end. The longest prompts take milliseconds.
const renderTime = 10 * time.Second

// Template renders conversations into prompts with a model's chat template. It is safe for concurrent use.
type Template struct {
	plain   *chatTemplate
	tools   *chatTemplate // for requests with tools
	special jinja.Dict
}

// chatTemplate is one parsed template with what it does with the content of messages.
type chatTemplate struct {
	tpl   *jinja.Template
	parts bool // it handles content that is a list of parts
	null  bool // it handles content that is null
}

// NewTemplate parses the chat templates of a configuration.
func NewTemplate(cfg *Config) (*Template, error) {
	t := &Template{}
	for _, s := range []struct{ name, token string }{
		{"bos_token", cfg.BOSToken}, {"eos_token", cfg.EOSToken}, {"pad_token", cfg.PadToken},
		{"unk_token", cfg.UnkToken}, {"sep_token", cfg.SepToken}, {"cls_token", cfg.ClsToken},
	} {
		if s.token != "" {
			t.special = append(t.special, jinja.Pair{Key: s.name, Value: s.token})
		}
	}
	source, ok := cfg.ChatTemplates[DefaultTemplate]
	if !ok {
		return nil, ErrNoTemplate
	}
	var err error
	if t.plain, err = newChatTemplate(DefaultTemplate, source); err != nil {
		return nil, err
	}
	t.tools = t.plain
	if source, ok := cfg.ChatTemplates[ToolTemplate]; ok {
		t.tools, err = newChatTemplate(ToolTemplate, source)
	}
	return t, err
}

func newChatTemplate(name, source string) (*chatTemplate, error) {
	tpl, err := jinja.Parse(source)
	if err != nil {
		return nil, fmt.Errorf("token: parse chat template %q: %w", name, err)
	}
	return &chatTemplate{tpl: tpl, parts: handlesParts(source), null: handlesNull(source)}, nil
}

// RenderOptions are the parts of a chat request beside its messages.
type RenderOptions struct {
	// Tools is the request's array of tools; nil, null or empty for none.
	Tools json.RawMessage
	// AddGenerationPrompt ends the prompt with the start of the assistant's answer.
	AddGenerationPrompt bool
	// Args is an object of further variables, such as enable_thinking (chat_template_kwargs).
	Args json.RawMessage
	// Now is the date for templates that print one. Zero: strftime_now is undefined, and templates use their fallback.
	Now time.Time
}

// Render returns the prompt of a conversation: messages is the request's JSON array, whose keys keep their order. It
// ends with ctx, and after ten seconds at the latest.
//
// Before the template sees the messages, three things are made the way templates expect them, as other servers do: the
// arguments of tool calls, JSON as text in OpenAI's API, become objects; and where the template does not handle them,
// a content of text parts becomes one text, with line breaks between the parts, and a null content the empty text.
func (t *Template) Render(ctx context.Context, messages json.RawMessage, o RenderOptions) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, renderTime)
	defer cancel()
	tools, err := parseTools(o.Tools)
	if err != nil {
		return "", err
	}
	chat := t.plain
	if _, none := tools.(jinja.None); !none {
		chat = t.tools
	}
	list, err := chat.messages(messages)
	if err != nil {
		return "", err
	}
	vars := jinja.Dict{
		{Key: "messages", Value: list}, {Key: "tools", Value: tools}, {Key: "documents", Value: jinja.None{}},
		{Key: "add_generation_prompt", Value: o.AddGenerationPrompt},
	}
	vars = append(vars, t.special...)
	args, err := parseArgs(o.Args)
	if err != nil {
		return "", err
	}
	out, err := chat.tpl.Render(ctx, jinja.Options{Vars: append(vars, args...), Now: o.Now})
	var raised *RaisedError
	if err != nil && !errors.As(err, &raised) {
		return "", fmt.Errorf("token: render the chat template: %w", err)
	}
	return out, err
}

// parseTools returns None when there are no tools.
func parseTools(raw json.RawMessage) (any, error) {
	if isNull(raw) {
		return jinja.None{}, nil
	}
	v, err := jinja.FromJSON(raw)
	if err != nil {
		return nil, &InputError{"tools", err}
	}
	list, ok := v.(jinja.List)
	if !ok {
		return nil, &InputError{"tools", errors.New("not an array")}
	}
	if len(list) == 0 {
		return jinja.None{}, nil
	}
	return list, nil
}

func parseArgs(raw json.RawMessage) (jinja.Dict, error) {
	if isNull(raw) {
		return nil, nil
	}
	v, err := jinja.FromJSON(raw)
	if err != nil {
		return nil, &InputError{"chat_template_kwargs", err}
	}
	args, ok := v.(jinja.Dict)
	if !ok {
		return nil, &InputError{"chat_template_kwargs", errors.New("not an object")}
	}
	for _, reserved := range []string{"messages", "tools"} {
		if _, ok := args.Get(reserved); ok {
			return nil, &InputError{"chat_template_kwargs", fmt.Errorf("%q is set by the request itself", reserved)}
		}
	}
	return args, nil
}
