package api

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestMessageJoinsDeltas(t *testing.T) {
	var m Message
	for _, d := range []string{
		`{"role":"assistant","content":null,"reasoning_content":"Let \u006d"}`,
		`{"reasoning_content":"e see.","tool_calls":[]}`,
		`{"tool_calls":[{"index":1,"id":"call_b","type":"function","function":{"name":"time","arguments":""}}]}`,
		`{"tool_calls":[{"index":0,"id":"call_a","type":"function","function":{"name":"weather","arguments":"{\"ci"}}]}`,
		`{"tool_calls":[{"index":0,"id":"call_a","type":"function","function":{"arguments":"ty\":\"Bern\"}"}},{"index":1,"function":{"arguments":"{}"}}]}`,
		`{"annotations":[1],"refusal":null}`,
	} {
		m.Add([]byte(d))
	}
	h := Head{ID: "x", Model: "m", Chat: true}
	out := h.AppendResponse(nil, []Choice{{RawText: []byte{}, Finish: "tool_calls", Message: &m}}, Usage{}, nil)
	var got struct {
		Choices []struct {
			Message struct {
				Role      string
				Content   *string
				Reasoning string `json:"reasoning_content"`
				ToolCalls []struct {
					ID, Type string
					Function struct{ Name, Arguments string }
				} `json:"tool_calls"`
				Annotations []int
			}
		}
	}
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("%s: %v", out, err)
	}
	msg := got.Choices[0].Message
	if msg.Role != "assistant" || msg.Content != nil || msg.Reasoning != "Let me see." || len(msg.Annotations) != 1 || len(msg.ToolCalls) != 2 {
		t.Fatalf("message %s", out)
	}
	b, a := msg.ToolCalls[0], msg.ToolCalls[1]
	if a.ID != "call_a" || a.Type != "function" || a.Function.Name != "weather" || a.Function.Arguments != `{"city":"Bern"}` || b.ID != "call_b" || b.Function.Name != "time" || b.Function.Arguments != "{}" {
		t.Errorf("calls %s", out)
	}
}

func FuzzMessage(f *testing.F) {
	f.Add([]byte(`{"tool_calls":[{"index":0,"function":{"name":"a","arguments":"{"}}]}`), []byte(`{"reasoning_content":"x","tool_calls":[{"index":0,"function":null}]}`))
	f.Add([]byte(`{"tool_calls":{}}`), []byte(`{"a":"b","a":1}`))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		var m Message
		m.Add(a)
		m.Add(b)
		h := Head{ID: "x", Model: "m", Chat: true}
		out := h.AppendResponse(nil, []Choice{{RawText: []byte("t"), Finish: "stop", Message: &m}}, Usage{}, nil)
		if !json.Valid(out) {
			t.Errorf("%q and %q became %q", a, b, out)
		}
	})
}

func TestWhatOnlySomeWorkersCanDo(t *testing.T) {
	chat := func(more string) []byte {
		return []byte(`{"model":"m","messages":[{"role":"user","content":"x"}]` + more + `}`)
	}
	tool := `,"tools":[{"type":"function","function":{"name":"f"}}]`
	for name, c := range map[string]struct{ more, refused string }{
		"nothing":                 {"", ""},
		"tools":                   {tool, "tools"},
		"tools and no choice":     {tool + `,"tool_choice":"none"`, ""},
		"no tools":                {`,"tools":[]`, ""},
		"text":                    {`,"response_format":{"type":"text"}`, ""},
		"a JSON object":           {`,"response_format":{"type":"json_object"}`, "response_format"},
		"a schema":                {`,"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{}}}`, "response_format"},
		"a guide of other makers": {`,"guided_regex":"a*"`, "guided_regex"},
	} {
		r, e := ParseRequest(chat(c.more), true, Limits{Client: true})
		if e != nil {
			t.Errorf("%s: %v; a worker that can do it never sees it", name, e)
			continue
		}
		e = r.CheckPlain()
		if got := paramOf(e); got != c.refused {
			t.Errorf("%s: refused %q, want %q", name, got, c.refused)
		}
		if body := forwarded(r); !strings.Contains(body, strings.TrimPrefix(c.more, ",")) {
			t.Errorf("%s: the worker gets %s", name, body)
		}
	}
	for _, bad := range []string{`,"response_format":"json"`, `,"response_format":{}`, `,"response_format":{"type":""}`, `,"response_format":{"type":"text","type":"json_object"}`, `,"tool_choice":3`, `,"web_search_options":{"a":1}`} {
		if _, e := ParseRequest(chat(bad), true, Limits{}); e == nil || e.Code != 400 {
			t.Errorf("%s: %v, want a 400", bad, e)
		}
	}
}

func paramOf(e *Error) string {
	if e == nil {
		return ""
	}
	return e.Param
}

func TestNothingIsFetchedForAClient(t *testing.T) {
	part := func(p string) []byte {
		return []byte(`{"model":"m","messages":[{"role":"system","content":"http://in.text/is.fine"},{"role":"user","content":[{"type":"text","text":"see http://x/"},` + p + `]}]}`)
	}
	for name, p := range map[string]string{
		"an image":             `{"type":"image_url","image_url":{"url":"http://169.254.169.254/latest"}}`,
		"an image, short form": `{"type":"image_url","image_url":"https://x/y.png"}`,
		"a file":               `{"type":"video_url","video_url":{"url":"file:///etc/passwd"}}`,
		"an escaped key":       `{"type":"image_url","image_\u0075rl":{"\u0075rl":"http://x"}}`,
		"upper case":           `{"type":"image_url","image_URL":{"URL":"HTTP://x"}}`,
		"an empty one":         `{"type":"image_url","image_url":{"url":""}}`,
		"deep inside":          `{"type":"x","a":[{"b":{"c":{"url":"http://x"}}}]}`,
		"too deep":             `{"type":"x","a":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + `}`,
	} {
		if _, e := ParseRequest(part(p), true, Limits{Client: true}); e == nil || e.Param != "messages[1].content" {
			t.Errorf("%s: %v, want a refusal of messages[1].content", name, e)
		}
	}
	for _, p := range []string{`{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=="}}`, `{"type":"text","text":"curl http://x"}`} {
		if _, e := ParseRequest(part(p), true, Limits{Client: true}); e != nil {
			t.Errorf("%s: %v", p, e)
		}
	}
}

func TestControlFieldsOfClientsAreNeitherReadNorForwarded(t *testing.T) {
	for _, key := range []string{
		"disaggregated_params", "prompt_token_ids", "prompt_token_ids_b64", "output_token_ids", "return_prompt_token_ids_b64",
		"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "ec_transfer_params",
	} {
		escaped := `\u00` + hexOf(key[0]) + key[1:]
		for _, k := range []string{key, escaped} {
			r, e := ParseRequest([]byte(`{"model":"m","prompt":"x","`+k+`":{"ctx_info_endpoint":"tcp://evil:1"},"keep":1}`), false, Limits{Client: true})
			if e != nil {
				t.Errorf("%s: %v", k, e)
				continue
			}
			body := forwarded(r)
			if r.Disagg != nil || r.PromptTokenIDs != nil || r.OutputTokenIDs != nil || strings.Contains(body, "evil") || !strings.Contains(body, `"keep":1`) {
				t.Errorf("%s: %+v forwarded as %s", k, r.Disagg, body)
			}
		}
		if _, e := ParseRequest([]byte(`{"model":"m","prompt":"x","`+key+`":1,"`+escaped+`":2}`), false, Limits{Client: true}); e == nil {
			t.Errorf("%s twice, in two spellings, was taken", key)
		}
	}
	for _, twice := range []string{`{"role":"user","role":"system","content":"x"}`, `{"role":"user","content":"a","content":"b"}`, `{"role":"user","content":"a","c\u006fntent":"b"}`} {
		if _, e := ParseRequest([]byte(`{"model":"m","messages":[`+twice+`]}`), true, Limits{Client: true}); e == nil {
			t.Errorf("%s was taken", twice)
		}
	}
}

func hexOf(b byte) string { const h = "0123456789abcdef"; return string([]byte{h[b>>4], h[b&15]}) }
