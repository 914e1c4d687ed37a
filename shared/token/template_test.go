package token

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// loadTemplate returns one of the templates that testdata/chats.json names.
func loadTemplate(t testing.TB, name string) *Template {
	t.Helper()
	if name == "llama31" {
		source, err := os.ReadFile("testdata/llama31.jinja")
		if err != nil {
			t.Fatal(err)
		}
		return mustTemplate(t, &Config{BOSToken: "<|begin_of_text|>", ChatTemplates: map[string]string{DefaultTemplate: string(source)}})
	}
	dir := "../../../shared/models/tokenizers/qwen3"
	if name == "tiny" {
		dir = tinyDir()
	}
	data, err := os.ReadFile(filepath.Join(dir, "tokenizer_config.json"))
	if os.IsNotExist(err) {
		t.Skip("the folder of model files is not beside the repository: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := ParseConfig(data)
	if err != nil {
		t.Fatal(err)
	}
	return mustTemplate(t, cfg)
}

func mustTemplate(t testing.TB, cfg *Config) *Template {
	t.Helper()
	tpl, err := NewTemplate(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return tpl
}

func templateOf(t testing.TB, source string) *Template {
	return mustTemplate(t, &Config{ChatTemplates: map[string]string{DefaultTemplate: source}})
}

// TestChatsRenderAsInPython compares with prompts by Python's jinja2, of the Qwen3 template itself, of ours, and of one
// that uses what the Llama 3.1 template uses.
func TestChatsRenderAsInPython(t *testing.T) {
	var chats []struct {
		Name     string
		Template string
		Messages json.RawMessage
		Tools    json.RawMessage
		Prompt   bool `json:"add_generation_prompt"`
		Args     json.RawMessage
	}
	var golden []struct{ Name, Template, Prompt, Error string }
	readJSON(t, "testdata/chats.json", &chats)
	readJSON(t, "testdata/chats.golden.json", &golden)
	for i, c := range chats {
		t.Run(c.Template+": "+c.Name, func(t *testing.T) {
			got, err := loadTemplate(t, c.Template).Render(t.Context(), c.Messages, RenderOptions{
				Tools: c.Tools, AddGenerationPrompt: c.Prompt, Args: c.Args, Now: time.Date(2026, 3, 7, 9, 5, 3, 0, time.UTC),
			})
			var raised *RaisedError
			if want := golden[i].Error; want != "" {
				if !errors.As(err, &raised) || raised.Message != want {
					t.Fatalf("gave %q, %v, want the error %q", got, err, want)
				}
				return
			}
			if err != nil || got != golden[i].Prompt {
				t.Fatalf("gave\n%s\n(%v), want\n%s", got, err, golden[i].Prompt)
			}
		})
	}
}

func TestMessagesAreAdaptedToTheTemplate(t *testing.T) {
	const plain = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
	const parts = "{% for m in messages %}{% for p in m['content'] %}<{{ p.text }}>{% endfor %}{% endfor %}"
	tests := []struct{ name, template, messages, want string }{
		{"text stays", plain, `[{"role":"user","content":"a"}]`, "[a]"},
		{"text parts become one text", plain, `[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]`, "[a\nb]"},
		{"a template that loops over parts gets them", parts, `[{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]}]`, "<a><b>"},
		{"null content becomes empty", plain, `[{"role":"assistant","content":null}]`, "[]"},
		{"missing content becomes empty", plain, `[{"role":"assistant"}]`, "[]"},
		{"a template that asks for none gets it", "{{ messages[0].content is none }}", `[{"role":"assistant","content":null}]`, "True"},
		{"arguments as text become an object", "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
			`[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\"b\": 1,\"a\":2}"}}]}]`, `{"b": 1, "a": 2}`},
		{"arguments that are no object stay text", "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
			`[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{b"}}]}]`, `"{b"`},
		{"empty arguments become an empty object", "{{ messages[0].tool_calls[0].function.arguments | tojson }}",
			`[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":""}}]}]`, `{}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := templateOf(t, tt.template).Render(t.Context(), json.RawMessage(tt.messages), RenderOptions{})
			if got != tt.want || err != nil {
				t.Errorf("gave %q, %v, want %q", got, err, tt.want)
			}
		})
	}
}

func TestBadInputNamesTheField(t *testing.T) {
	tests := []struct{ name, messages, tools, args, field string }{
		{"messages that are no JSON", `[`, ``, ``, "messages"},
		{"messages that are an object", `{}`, ``, ``, "messages"},
		{"a message that is a text", `["a"]`, ``, ``, "messages"},
		{"a picture for a model of text", `[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]`, ``, ``, "messages"},
		{"tools that are an object", `[]`, `{}`, ``, "tools"},
		{"arguments that are an array", `[]`, ``, `[]`, "chat_template_kwargs"},
		{"arguments that replace the messages", `[]`, ``, `{"messages":[]}`, "chat_template_kwargs"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := templateOf(t, "x").Render(t.Context(), json.RawMessage(tt.messages),
				RenderOptions{Tools: json.RawMessage(tt.tools), Args: json.RawMessage(tt.args)})
			var input *InputError
			if !errors.As(err, &input) || input.Field != tt.field {
				t.Errorf("gave %v, want an InputError for %s", err, tt.field)
			}
		})
	}
}

func TestToolRequestsUseTheirOwnTemplate(t *testing.T) {
	tpl := mustTemplate(t, &Config{ChatTemplates: map[string]string{DefaultTemplate: "plain", ToolTemplate: "{{ tools|length }} tools"}})
	for tools, want := range map[string]string{"": "plain", "null": "plain", "[]": "plain", `[{"type":"function"}]`: "1 tools"} {
		got, err := tpl.Render(t.Context(), json.RawMessage(`[]`), RenderOptions{Tools: json.RawMessage(tools)})
		if got != want || err != nil {
			t.Errorf("tools %q gave %q, %v, want %q", tools, got, err, want)
		}
	}
}

func TestTheDateIsUndefinedUnlessGiven(t *testing.T) {
	tpl := templateOf(t, "{{ strftime_now('%Y') if strftime_now is defined else 'no date' }}")
	for want, now := range map[string]time.Time{"no date": {}, "2031": time.Date(2031, 1, 1, 0, 0, 0, 0, time.UTC)} {
		if got, err := tpl.Render(t.Context(), json.RawMessage(`[]`), RenderOptions{Now: now}); got != want || err != nil {
			t.Errorf("gave %q, %v, want %q", got, err, want)
		}
	}
}

func TestRenderEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	loop := "{% for x in range(99999) %}"
	tpl := templateOf(t, strings.Repeat(loop, 4)+strings.Repeat("{% endfor %}", 4))
	if _, err := tpl.Render(ctx, json.RawMessage(`[]`), RenderOptions{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("gave %v", err)
	}
}

func TestAModelWithoutTemplateSaysSo(t *testing.T) {
	if _, err := NewTemplate(&Config{}); !errors.Is(err, ErrNoTemplate) {
		t.Fatalf("gave %v", err)
	}
}

// FuzzRender renders any messages and arguments with a real template's constructs.
func FuzzRender(f *testing.F) {
	var chats []struct{ Messages, Tools, Args json.RawMessage }
	readJSON(f, "testdata/chats.json", &chats)
	for _, c := range chats {
		f.Add([]byte(c.Messages), []byte(c.Tools), []byte(c.Args))
	}
	tpl := loadTemplate(f, "llama31")
	f.Fuzz(func(t *testing.T, messages, tools, args []byte) {
		out, err := tpl.Render(t.Context(), messages, RenderOptions{Tools: tools, Args: args, AddGenerationPrompt: true})
		if err != nil && out != "" {
			t.Fatalf("gave %q with the error %v", out, err)
		}
		if err == nil && !strings.HasPrefix(out, "<|begin_of_text|>") && len(args) < 3 {
			t.Fatalf("gave %q", out)
		}
	})
}
