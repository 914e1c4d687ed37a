package api

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func TestParseRequestAccepts(t *testing.T) {
	body := `{"model":"m","prompt":["a","b"],"max_tokens":7,"stream":true,"stream_options":{"include_usage":true},"n":2,
		"stop":["x","y"],"stop_token_ids":[5],"ignore_eos":true,"temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.1,
		"repetition_penalty":1.1,"presence_penalty":-1,"frequency_penalty":2,"seed":9007199254740993,"logit_bias":{"3":-100},
		"logprobs":2,"user":"u","priority":3,"prompt_cache_retention":"24h","future_field":{"a":[1.0,1e2]},"best_of":null}`
	r, e := ParseRequest([]byte(body), false, Limits{})
	if e != nil {
		t.Fatal(e)
	}
	if r.Model != "m" || len(r.Prompts) != 2 || r.Prompts[1].Text() != "b" || *r.MaxTokens != 7 || !r.Stream || !r.IncludeUsage ||
		r.N != 2 || !slices.Equal(r.Stop, []string{"x", "y"}) || !slices.Equal(r.StopTokenIDs, []int32{5}) || !r.IgnoreEOS ||
		*r.Logprobs != 2 || r.User != "u" || r.Priority != 3 || !r.Pin || !r.SeedSet {
		t.Errorf("got %+v", r)
	}
	s := r.Sampling
	if s.Temperature != 0.5 || s.TopP != 0.9 || s.TopK != 40 || s.MinP != 0.1 || s.RepetitionPenalty != 1.1 || s.PresencePenalty != -1 ||
		s.FrequencyPenalty != 2 || s.Seed != 9007199254740993 || s.LogitBias[3] != -100 || !s.Logprobs || s.TopLogprobs != 2 {
		t.Errorf("got %+v", s)
	}
}

func TestParsePromptForms(t *testing.T) {
	cases := []struct {
		name, prompt string
		want         []string // text, or the ids
	}{
		{"text", `"hi \u00e9\n"`, []string{"hi é\n"}},
		{"ids", `[1, 2,3]`, []string{"[1,2,3]"}},
		{"texts", `["a","b"]`, []string{"a", "b"}},
		{"arrays of ids", `[[1],[2,3]]`, []string{"[1]", "[2,3]"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r, e := ParseRequest([]byte(`{"model":"m","prompt":`+c.prompt+`}`), false, Limits{})
			if e != nil {
				t.Fatal(e)
			}
			var got []string
			for _, p := range r.Prompts {
				if p.IDs != nil {
					got = append(got, string(AppendIDs(nil, p.IDs)))
				} else {
					got = append(got, p.Text())
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("got %q", got)
			}
		})
	}
}

func TestParseRequestRefuses(t *testing.T) {
	lim := Limits{MaxBody: 4000, ContextLen: 10, VocabSize: 100, KnowsModel: func(m string) bool { return m == "m" }}
	completion := func(s string) string { return `{"model":"m","prompt":"p",` + s + `}` }
	cases := []struct {
		name, body, param string
		status            int
	}{
		{"malformed JSON", `{"model":`, "", 400},
		{"data after the object", `{"model":"m","prompt":"p"} x`, "", 400},
		{"an array", `[1]`, "", 400},
		{"nothing", ``, "", 400},
		{"invalid UTF-8", "{\"model\":\"m\",\"prompt\":\"\xff\"}", "", 400},
		{"a body over the limit", completion(`"user":"` + strings.Repeat("x", 4000) + `"`), "", 413},
		{"no model", `{"prompt":"p"}`, "model", 400},
		{"an unknown model", `{"model":"z","prompt":"p"}`, "model", 404},
		{"a model of a wrong type", `{"model":7,"prompt":"p"}`, "model", 400},
		{"no prompt", `{"model":"m"}`, "prompt", 400},
		{"a null prompt", `{"model":"m","prompt":null}`, "prompt", 400},
		{"an empty prompt", `{"model":"m","prompt":""}`, "prompt", 400},
		{"an empty array", `{"model":"m","prompt":[]}`, "prompt", 400},
		{"an empty text among texts", `{"model":"m","prompt":["a",""]}`, "prompt", 400},
		{"a mixed array", `{"model":"m","prompt":["a",1]}`, "prompt", 400},
		{"a negative token id", `{"model":"m","prompt":[-1]}`, "prompt", 400},
		{"a token id that is no integer", `{"model":"m","prompt":[1.5]}`, "prompt", 400},
		{"a token id over 31 bits", `{"model":"m","prompt":[99999999999999999999]}`, "prompt", 400},
		{"a token id outside the vocabulary", `{"model":"m","prompt":[100]}`, "prompt", 400},
		{"a prompt as long as the context", `{"model":"m","prompt":[1,1,1,1,1,1,1,1,1,1]}`, "prompt", 400},
		{"negative max_tokens", completion(`"max_tokens":-1`), "max_tokens", 400},
		{"max_tokens of 0", completion(`"max_tokens":0`), "max_tokens", 400},
		{"max_tokens over the context", completion(`"max_tokens":11`), "max_tokens", 400},
		{"max_completion_tokens over the context", completion(`"max_tokens":null,"max_completion_tokens":11`), "max_completion_tokens", 400},
		{"max_tokens over 64 bits", completion(`"max_tokens":99999999999999999999`), "max_tokens", 400},
		{"max_tokens as text", completion(`"max_tokens":"5"`), "max_tokens", 400},
		{"n over 128", completion(`"n":129`), "n", 400},
		{"n of 0", completion(`"n":0`), "n", 400},
		{"too many choices in all", `{"model":"m","prompt":["a","b","c"],"n":100}`, "n", 400},
		{"temperature over 2", completion(`"temperature":2.1`), "temperature", 400},
		{"temperature as text", completion(`"temperature":"1"`), "temperature", 400},
		{"temperature beyond numbers", completion(`"temperature":1e999`), "temperature", 400},
		{"top_p below 0", completion(`"top_p":-0.1`), "top_p", 400},
		{"a seed that is no integer", completion(`"seed":1.5`), "seed", 400},
		{"an empty stop string", completion(`"stop":[""]`), "stop", 400},
		{"stop of a wrong type", completion(`"stop":7`), "stop", 400},
		{"too many logprobs", completion(`"logprobs":21`), "logprobs", 400},
		{"another retention", completion(`"prompt_cache_retention":"1h"`), "prompt_cache_retention", 400},
		{"a bias of no number", completion(`"logit_bias":{"1":"x"}`), "logit_bias", 400},
		{"two biases on one token", completion(`"logit_bias":{"1":5,"1":-5}`), "logit_bias", 400},
		{"two biases on one token, spelled apart", completion(`"logit_bias":{"1":5,"01":-5}`), "logit_bias", 400},
		{"a bias on no token", completion(`"logit_bias":{"x":1}`), "logit_bias", 400},
		{"a bias outside the vocabulary", completion(`"logit_bias":{"100":1}`), "logit_bias", 400},
		{"a stop token outside the vocabulary", completion(`"stop_token_ids":[100]`), "stop_token_ids", 400},
		{"a repetition penalty of 0", completion(`"repetition_penalty":0`), "repetition_penalty", 400},
		{"a conversation of a wrong type", completion(`"conversation_id":5`), "conversation_id", 400},
		{"a conversation with a long name", completion(`"conversation_id":"` + strings.Repeat("x", 513) + `"`), "conversation_id", 400},
		{"conversation_params of a wrong type", completion(`"conversation_params":5`), "conversation_params", 400},
		{"conversation_params with an id of a wrong type", completion(`"conversation_params":{"conversation_id":5}`), "conversation_params.conversation_id", 400},
		{"echo", completion(`"echo":true`), "echo", 400},
		{"best_of", completion(`"best_of":2`), "best_of", 400},
		{"stream of a wrong type", completion(`"stream":"yes"`), "stream", 400},
		{"include_usage of a wrong type", completion(`"stream_options":{"include_usage":1}`), "stream_options.include_usage", 400},
		{"a field twice", completion(`"seed":1,"seed":2`), "seed", 400},
		{"a field twice in stream_options", completion(`"stream_options":{"include_usage":true,"include_usage":false}`), "stream_options.include_usage", 400},
		{"a field twice in conversation_params", completion(`"conversation_params":{"x":1,"x":2}`), "conversation_params.x", 400},
		{"a field twice in response_format", completion(`"response_format":{"type":"text","type":"text"}`), "response_format.type", 400},
		{"a field twice, once escaped", completion(`"disaggregated_params":null,"disaggregated\u005fparams":{}`), "disaggregated_params", 400},
		{"messages to completions", completion(`"messages":[]`), "messages", 400},
		{"disaggregated_params of a wrong type", completion(`"disaggregated_params":{"disagg_request_id":"x"}`), "disaggregated_params.disagg_request_id", 400},
		{"disaggregated_params that are no object", completion(`"disaggregated_params":5`), "disaggregated_params", 400},
		{"deep nesting", completion(`"x":` + strings.Repeat("[", 1000) + strings.Repeat("]", 1000)), "", 400},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, e := ParseRequest([]byte(c.body), false, lim)
			wantRefusal(t, e, c.param, c.status)
		})
	}
}

// Who reads a body stops behind the limit: nobody knows how long it is.
func TestABodyOverTheLimitIsOfNoSaidLength(t *testing.T) {
	_, e := ParseRequest(make([]byte, 11), false, Limits{MaxBody: 10})
	if e == nil || e.Status() != 413 || strings.Contains(e.Message, "11") {
		t.Errorf("got %v", e)
	}
}

func TestConversations(t *testing.T) {
	for members, want := range map[string]string{
		`"conversation_id":"a"`: "a", `"conversation_params":{"conversation_id":"b"}`: "b", `"conversation_id":null,"conversation_params":{}`: "",
		`"conversation_id":"a","conversation_params":{"conversation_id":"b","x":1}`: "b", `"conversation_params":{"conversation_id":"b"},"conversation_id":"a"`: "b",
	} {
		r, e := ParseRequest([]byte(`{"model":"m","prompt":"p",`+members+`}`), false, Limits{Client: true})
		if e != nil || r.Conversation != want {
			t.Errorf("%s: %v, %+v; want %q", members, e, r, want)
		}
	}
}

func TestParseChatRefuses(t *testing.T) {
	cases := []struct{ name, body, param string }{
		{"no messages", `{"model":"m"}`, "messages"},
		{"empty messages", `{"model":"m","messages":[]}`, "messages"},
		{"messages as text", `{"model":"m","messages":"hi"}`, "messages"},
		{"a message without a role", `{"model":"m","messages":[{"content":"x"}]}`, "messages[0].role"},
		{"a tool that there is not", `{"model":"m","messages":[{"role":"user","content":"x"}],"tool_choice":"required","tools":[]}`, "tool_choice"},
		{"a function that there is not", `{"model":"m","messages":[{"role":"user","content":"x"}],"tool_choice":{"type":"function"}}`, "tool_choice"},
		{"a role of a wrong type", `{"model":"m","messages":[{"role":1}]}`, "messages[0].role"},
		{"content of a wrong type", `{"model":"m","messages":[{"role":"user","content":7}]}`, "messages[0].content"},
		{"a message that is no object", `{"model":"m","messages":["x"]}`, "messages[0]"},
		{"a prompt to chat", `{"model":"m","messages":[{"role":"user"}],"prompt":"x"}`, "prompt"},
		{"top_logprobs without logprobs", `{"model":"m","messages":[{"role":"user"}],"top_logprobs":2}`, "top_logprobs"},
		{"two different limits", `{"model":"m","messages":[{"role":"user"}],"max_tokens":2,"max_completion_tokens":3}`, "max_completion_tokens"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			_, e := ParseRequest([]byte(c.body), true, Limits{})
			wantRefusal(t, e, c.param, 400)
		})
	}
}

func wantRefusal(t *testing.T, e *Error, param string, status int) {
	t.Helper()
	if e == nil {
		t.Fatal("accepted")
	}
	if e.Param != param || e.Status() != status {
		t.Errorf("got %d, param %q (%v); want %d, %q", e.Status(), e.Param, e, status, param)
	}
	var obj struct {
		Error struct {
			Message, Type, Stage string
			Param                *string
			Retryable            bool
		}
	}
	if err := json.Unmarshal(e.Append(nil), &obj); err != nil || obj.Error.Message == "" || obj.Error.Type == "" ||
		obj.Error.Stage != "parse" || obj.Error.Retryable {
		t.Errorf("body %s: %v, %+v", e.Append(nil), err, obj)
	}
}

func TestAChatHasNoMoreMessagesThanTheContextHasTokens(t *testing.T) {
	body := `{"model":"m","messages":[{"role":"user","content":""},{"role":"user","content":""},{"role":"user","content":""}]}`
	r, e := ParseRequest([]byte(body), true, Limits{})
	if e != nil {
		t.Fatal(e)
	}
	for contextLen, ok := range map[int]bool{2: false, 3: true, 4: true, 0: true} {
		if e := r.CheckTurns(contextLen); (e == nil) != ok || e != nil && (e.Param != "messages" || e.Status() != 400) {
			t.Errorf("3 messages for a context of %d: %v", contextLen, e)
		}
	}
}

func TestBudget(t *testing.T) {
	limit := func(n int) *int { return &n }
	cases := []struct {
		name             string
		chat             bool
		max              *int
		prompt, ctx, out int
		param            string
	}{
		{"max_tokens that fits exactly", false, limit(6), 4, 10, 6, ""},
		{"one token too many", false, limit(7), 4, 10, 0, "max_tokens"},
		{"no room", false, nil, 10, 10, 0, "prompt"},
		{"no room in chat", true, nil, 11, 10, 0, "messages"},
		{"an empty prompt", false, nil, 0, 10, 0, "prompt"},
		{"completions default to 16", false, nil, 4, 100, 16, ""},
		{"completions default to the rest", false, nil, 4, 10, 6, ""},
		{"chat defaults to the rest", true, nil, 4, 100, 96, ""},
		{"an unknown context is not checked", false, limit(1000), 4, 0, 1000, ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			r := &Request{Chat: c.chat, MaxTokens: c.max, maxField: "max_tokens"}
			got, e := r.Budget(c.prompt, c.ctx)
			if (e == nil) != (c.param == "") || got != c.out || (e != nil && e.Param != c.param) {
				t.Errorf("got %d, %v; want %d, %q", got, e, c.out, c.param)
			}
		})
	}
}

func TestTheBudgetNamesTheFieldThatWasSent(t *testing.T) {
	for _, field := range []string{"max_tokens", "max_completion_tokens"} {
		r, e := ParseRequest([]byte(`{"model":"m","prompt":"p","`+field+`":7}`), false, Limits{})
		if e != nil {
			t.Fatal(e)
		}
		if _, e := r.Budget(4, 10); e == nil || e.Param != field || !strings.Contains(e.Message, "and "+field+" is 7") {
			t.Errorf("%s: %v", field, e)
		}
	}
}

// forwarded is the body that a worker gets.
func forwarded(r *Request, set ...Set) string {
	return string(bytes.Join(r.AppendOpen(nil, set), nil)) + "}"
}

func TestTheBodyOfALeg(t *testing.T) {
	for _, c := range []struct {
		name, body string
		set        []Set
		want       string
	}{
		{
			"numbers and unknown fields as sent, a replaced member at the end", `{"model":"m","prompt":"p","seed":9007199254740993,"x":{"a":1.0,"b":1e2},"stream":false}`,
			[]Set{{"stream", []byte("true")}, {"prompt", []byte("[1,2]")}, {"x2", []byte("1")}, {"gone", nil}},
			`{"model":"m","seed":9007199254740993,"x":{"a":1.0,"b":1e2},"stream":true,"prompt":[1,2],"x2":1}`,
		},
		{"the first member goes", ` { "n" : 1 , "model":"m", "prompt":"p" } `, []Set{{"n", nil}}, `{ "model":"m", "prompt":"p"}`},
		{"the first two and the last go", `{"n":1,"stream":true,"model":"m","prompt":"p","seed":1}`, []Set{{"n", nil}, {"stream", nil}, {"seed", nil}}, `{"model":"m","prompt":"p"}`},
		{"a key is sent in plain spelling", `{"m\u006fdel":"m","pr\u006fmpt":"p","x":1}`, nil, `{"model":"m","prompt":"p","x":1}`},
		{"all are replaced", `{"model":"m","prompt":"p"}`, []Set{{"prompt", []byte(`"q"`)}, {"model", []byte(`"k"`)}}, `{"prompt":"q","model":"k"}`},
		{
			"control fields of the client are dropped, however they are spelled",
			`{"model":"m","prompt_token_ids":[1],"prompt":"p","disaggregated\u005fparams":{"request_type":"generation_only","ctx_info_endpoint":"tcp://evil:1"}}`,
			[]Set{{"disaggregated_params", []byte(`{"request_type":"context_only"}`)}}, `{"model":"m","prompt":"p","disaggregated_params":{"request_type":"context_only"}}`,
		},
	} {
		r, e := ParseRequest([]byte(c.body), false, Limits{Client: true})
		if e != nil {
			t.Fatalf("%s: %v", c.name, e)
		}
		if got := forwarded(r, c.set...); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.name, got, c.want)
		}
	}
}

func TestALongPromptIsNotCopiedIntoALeg(t *testing.T) {
	body := []byte(`{"model":"m","prompt":"` + strings.Repeat("p", 1000) + `","stream":true,"max_tokens":3}`)
	r, e := ParseRequest(body, false, Limits{})
	if e != nil {
		t.Fatal(e)
	}
	pieces := r.AppendOpen(nil, []Set{{"stream", nil}, {"seed", []byte("7")}})
	if len(pieces) != 3 || &pieces[0][0] != &body[0] || string(pieces[1]) != `,"max_tokens":3` || string(pieces[2]) != `,"seed":7` {
		t.Errorf("%d pieces: %q", len(pieces), pieces)
	}
}

func TestSplitObjectAgreesWithEncodingJSON(t *testing.T) {
	for _, s := range []string{
		`{}`, `{"a":1}`, ` { "a" : [ 1 , 2 ] } `, `{"a":01}`, `{"a":1.}`, `{"a":.5}`, `{"a":-}`, `{"a":-0}`, `{"a":1e5}`, `{"a":1e}`,
		`{"a":"\x"}`, `{"a":"\u12g4"}`, `{"a":"\ud800"}`, "{\"a\":\"\n\"}", `{"a":tru}`, `{"a":true}`, `{"a",1}`, `{a:1}`, `{"a":1,}`, `{"a":[1,]}`, `{"a":nul`,
	} {
		_, err := SplitObject(nil, []byte(s))
		if (err == nil) != json.Valid([]byte(s)) {
			t.Errorf("%s: got %v, encoding/json says %v", s, err, json.Valid([]byte(s)))
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add([]byte(`{"model":"m","prompt":"p","n":2,"stop":["a"],"disaggregated_params":{"request_type":"context_only"}}`), false)
	f.Add([]byte(`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}],"logprobs":true}`), true)
	f.Add([]byte(`{"model":"m","prompt":[[1,2],[3]],"seed":-1,"logit_bias":{"1":2}}`), false)
	f.Fuzz(func(t *testing.T, body []byte, chat bool) {
		r, e := ParseRequest(body, chat, Limits{ContextLen: 100, VocabSize: 1000})
		if e != nil {
			if e.Status() < 400 || e.Status() > 499 || !json.Valid(e.Append(nil)) {
				t.Errorf("error %d %s", e.Status(), e.Append(nil))
			}
			return
		}
		out := []byte(forwarded(r, Set{"stream", []byte("true")}))
		again, e := ParseRequest(out, chat, Limits{ContextLen: 100, VocabSize: 1000})
		if e != nil {
			t.Fatalf("%s became %s: %v", body, out, e)
		}
		if again.Disagg != nil || again.PromptTokenIDs != nil || !again.Stream || again.Model != r.Model ||
			!reflect.DeepEqual(again.Sampling, r.Sampling) || !reflect.DeepEqual(again.Prompts, r.Prompts) {
			t.Errorf("%s became %s", body, out)
		}
	})
}

func FuzzSplitObject(f *testing.F) {
	f.Add([]byte(`{"a":1,"b":[true,null,"x\n"]}`))
	f.Add([]byte(`{"a":-1.5e+7}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		fields, err := SplitObject(nil, b)
		var m map[string]json.RawMessage
		jerr := json.Unmarshal(b, &m)
		if jerr == nil && bytes.HasPrefix(bytes.TrimLeft(b, " \t\r\n"), []byte("null")) {
			return
		}
		if err == nil && jerr != nil {
			t.Errorf("accepted %q: %v", b, jerr)
		}
		if err != nil && jerr == nil && !strings.Contains(err.Error(), "deeper") && !strings.Contains(err.Error(), "more than") {
			t.Errorf("refused %q: %v", b, err)
		}
		for _, f := range fields {
			if err == nil && !json.Valid(f.Value) {
				t.Errorf("value %q of %q", f.Value, f.Key)
			}
		}
	})
}

func BenchmarkParseRequest(b *testing.B) {
	for name, size := range map[string]int{"2KB": 2 << 10, "64KB": 64 << 10} {
		body := []byte(`{"model":"m","prompt":"` + strings.Repeat("word ", size/5) + `","max_tokens":16,"stream":true,"temperature":0}`)
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(body)))
			b.ReportAllocs()
			for b.Loop() {
				if _, e := ParseRequest(body, false, Limits{}); e != nil {
					b.Fatal(e)
				}
			}
		})
	}
}

// biases is a logit_bias of n entries.
func biases(n int) string {
	out := []string{}
	for i := range n {
		out = append(out, `"`+strconv.Itoa(i)+`":1`)
	}
	return "{" + strings.Join(out, ",") + "}"
}

func TestAsManyBiasesAsMayBeAreTaken(t *testing.T) {
	for n, want := range map[int]bool{maxLogitBias: true, maxLogitBias + 1: false} {
		r, e := ParseRequest([]byte(`{"model":"m","prompt":"x","logit_bias":`+biases(n)+`}`), false, Limits{})
		if took := e == nil; took != want || took && len(r.Sampling.LogitBias) != n {
			t.Errorf("%d: %v", n, e)
		}
	}
}
