package api

import (
	"encoding/json"
	"math"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"
)

func head(chat bool) Head { return Head{ID: "cmpl-1", Model: `m"x`, Created: 7, Chat: chat} }

func TestAppendChunk(t *testing.T) {
	lps := []TokenLogprob{{Text: "a", Bytes: []byte("a"), Logprob: -0.5, Offset: 3, Top: []TokenLogprob{{Text: "b", Logprob: -1}}}}
	id := int64(1) << 60
	cases := []struct {
		name string
		chat bool
		c    Choice
		want string
	}{
		{"completions", false, Choice{Index: 2, Text: "a\"\n", TokenIDs: []int32{5, 6}},
			`{"id":"cmpl-1","object":"text_completion","created":7,"model":"m\"x","choices":[{"index":2,"text":"a\"\n","logprobs":null,"finish_reason":null,"token_ids":[5,6]}]}`},
		{"the end of completions", false, Choice{Finish: "stop", StopReason: json.RawMessage(`"x"`)},
			`{"id":"cmpl-1","object":"text_completion","created":7,"model":"m\"x","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":"x"}]}`},
		{"logprobs of completions", false, Choice{Text: "a", Logprobs: lps},
			`{"id":"cmpl-1","object":"text_completion","created":7,"model":"m\"x","choices":[{"index":0,"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-0.5],"top_logprobs":[{"b":-1}],"text_offset":[3]},"finish_reason":null}]}`},
		{"the first chunk of chat", true, Choice{Role: true},
			`{"id":"cmpl-1","object":"chat.completion.chunk","created":7,"model":"m\"x","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}`},
		{"the end of chat", true, Choice{Finish: "length"},
			`{"id":"cmpl-1","object":"chat.completion.chunk","created":7,"model":"m\"x","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}]}`},
		{"logprobs of chat", true, Choice{Text: "a", Logprobs: lps},
			`{"id":"cmpl-1","object":"chat.completion.chunk","created":7,"model":"m\"x","choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"b","logprob":-1,"bytes":[]}]}]},"finish_reason":null}]}`},
		{"disaggregated_params keep 64 bits", false, Choice{Disagg: &DisaggParams{RequestType: ContextOnly, DisaggRequestID: &id}},
			`{"id":"cmpl-1","object":"text_completion","created":7,"model":"m\"x","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":null,"disaggregated_params":{"request_type":"context_only","disagg_request_id":1152921504606846976}}]}`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			got := string(head(c.chat).AppendChunk(nil, c.c))
			want := strings.Replace(c.want, "\n", `\n`, 1)
			if got != want || !json.Valid([]byte(got)) {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
}

func TestAppendResponse(t *testing.T) {
	u := Usage{PromptTokens: 1, CompletionTokens: 2, TotalTokens: 3, PromptTokensDetails: &PromptTokensDetails{CachedTokens: 1}}
	got := string(head(true).AppendResponse(nil, []Choice{{Text: "a", Finish: "stop"}, {Index: 1, Text: "b", Finish: "length"}}, u, []int32{9}))
	want := `{"id":"cmpl-1","object":"chat.completion","created":7,"model":"m\"x","choices":[` +
		`{"index":0,"message":{"role":"assistant","content":"a"},"logprobs":null,"finish_reason":"stop"},` +
		`{"index":1,"message":{"role":"assistant","content":"b"},"logprobs":null,"finish_reason":"length"}],` +
		`"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":1}},"prompt_token_ids":[9]}`
	if got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestRewriteChunk(t *testing.T) {
	rw := &Rewrite{ID: []byte(`"new"`), Model: []byte(`"pub"`), Index: 3}
	cases := []struct {
		name, in, want string
		chat           bool
		text, finish   string
	}{
		{"completions", `{"id":"x","model":"m","extra":1.0,"choices":[{"index":0,"text":"a\u00e9","token_ids":[1],"finish_reason":null}],"usage":{"prompt_tokens":1}}`,
			`{"id":"new","model":"pub","extra":1.0,"choices":[{"index":3,"text":"a\u00e9","finish_reason":null}]}`, false, `a\u00e9`, ""},
		{"chat", `{"id":"x","choices":[{"index":0,"delta":{"content":"hi","x":1},"finish_reason":"stop","disaggregated_params":{}}]}`,
			`{"id":"new","choices":[{"index":3,"delta":{"content":"hi","x":1},"finish_reason":"stop"}]}`, true, "hi", "stop"},
		{"no choices", `{"id":"x","choices":[],"usage":{"prompt_tokens":1}}`, `{"id":"new","choices":[]}`, false, "", ""},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			chunk, out, err := RewriteChunk(nil, []byte(c.in), c.chat, rw)
			if err != nil || string(out) != c.want || string(chunk.Text) != c.text || chunk.Finish != c.finish {
				t.Errorf("got %s, %+v, %v\nwant %s", out, chunk, err, c.want)
			}
		})
	}
	kept := *rw
	kept.KeepUsage = true
	_, out, err := RewriteChunk(nil, []byte(`{"id":"x","usage":{"prompt_tokens":1}}`), false, &kept)
	if err != nil || string(out) != `{"id":"new","usage":{"prompt_tokens":1}}` {
		t.Errorf("usage: got %s, %v", out, err)
	}
}

func TestReadChunk(t *testing.T) {
	c, err := ReadChunk([]byte(`{"choices":[{"text":"a","token_ids":[1,2],"logprobs":{"tokens":[]},"stop_reason":7}],"usage":null}`), false)
	if err != nil || string(c.TokenIDs) != "[1,2]" || string(c.Logprobs) != `{"tokens":[]}` || string(c.StopReason) != "7" || c.Usage != nil {
		t.Errorf("got %+v, %v", c, err)
	}
	if c, err = ReadChunk([]byte(`{"error":{"message":"x"}}`), false); err != nil || c.Error == nil {
		t.Errorf("error event: got %+v, %v", c, err)
	}
	if c, err = ReadChunk([]byte(`{"object":"trtllm.perf_metrics","x":1}`), false); err != nil || !c.OnlyMetadata {
		t.Errorf("metrics event: got %+v, %v", c, err)
	}
	for _, bad := range []string{``, `7`, `{"choices":7}`, `{"choices":[7]}`, `{"choices":[{"finish_reason":7}]}`, `{"choices":[{}`} {
		if _, err := ReadChunk([]byte(bad), false); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func FuzzRewriteChunk(f *testing.F) {
	f.Add([]byte(`{"id":"x","model":"m","choices":[{"index":0,"text":"a","token_ids":[1]},{"index":1}],"usage":{}}`), false)
	f.Add([]byte(`{"id":"x","choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}`), true)
	f.Add([]byte(`{"id":"x","choices":null,"error":{"message":"m"}}`), true)
	rw := &Rewrite{ID: []byte(`"new"`), Model: []byte(`"pub"`), Index: 3}
	f.Fuzz(func(t *testing.T, in []byte, chat bool) {
		a, err := ReadChunk(in, chat)
		b, out, err2 := RewriteChunk(nil, in, chat, rw)
		if (err == nil) != (err2 == nil) {
			t.Fatalf("read: %v, rewrite: %v", err, err2)
		}
		if err != nil {
			if len(out) > 0 {
				t.Errorf("%q is refused, and yet became %q", in, out)
			}
			return
		}
		if !json.Valid(in) {
			t.Errorf("%q was accepted", in)
		}
		if string(a.Text) != string(b.Text) || a.Finish != b.Finish || a.Choices != b.Choices {
			t.Errorf("read %+v, rewrite %+v", a, b)
		}
		if !json.Valid(out) {
			t.Errorf("%q became %q", in, out)
		}
	})
}

func TestParseError(t *testing.T) {
	cases := []struct {
		name, body string
		status     int
		want       Error
	}{
		{"ours", `{"error":{"message":"m","type":"t","param":"p","stage":"kv","retryable":false}}`, 500,
			Error{Code: 500, Message: "m", Type: "t", Param: "p", Stage: "kv"}},
		{"OpenAI's", `{"error":{"message":"m","type":"t","param":null,"code":429}}`, 429,
			Error{Code: 429, Message: "m", Type: "t", Stage: "ctx", Retryable: true}},
		{"TensorRT-LLM's", `{"object":"error","message":"m","type":"BadRequestError","param":null,"code":400}`, 400,
			Error{Code: 400, Message: "m", Type: TypeInvalid, Stage: "ctx"}},
		{"FastAPI's", `{"detail":[{"msg":"m"}]}`, 422, Error{Code: 422, Message: `[{"msg":"m"}]`, Type: TypeInvalid, Stage: "ctx"}},
		{"FastAPI's, in short", `{"detail":"m"}`, 422, Error{Code: 422, Message: "m", Type: TypeInvalid, Stage: "ctx"}},
		{"a bad request that says to come again", `{"error":{"message":"m","type":"t","retryable":true}}`, 400, Error{Code: 400, Message: "m", Type: "t", Stage: "ctx"}},
		{"a router that may not", `{"error":{"message":"m","type":"invalid_request_error"}}`, 401,
			Error{Code: 502, Message: "it answered with status 401: m", Type: TypeServer, Stage: "ctx", Retryable: true}},
		{"another address", ``, 302, Error{Code: 502, Message: "it answered with status 302: Found", Type: TypeServer, Stage: "ctx", Retryable: true}},
		{"nothing, and well", ``, 204, Error{Code: 502, Message: "it answered with status 204: No Content", Type: TypeServer, Stage: "ctx", Retryable: true}},
		{"an error that is text", `{"error":"m"}`, 503, Error{Code: 503, Message: "m", Type: TypeUnavailable, Stage: "ctx", Retryable: true}},
		{"plain text", `no`, 404, Error{Code: 404, Message: "no", Type: TypeNotFound, Stage: "ctx"}},
		{"one that was stopped", `{"error":{"message":"the client went away","type":"cancelled_error","code":499,"retryable":false}}`, 499,
			Error{Code: 503, Message: "it stopped: the client went away", Type: TypeUnavailable, Stage: "ctx", Retryable: true}},
		{"nothing", ``, 504, Error{Code: 504, Message: "Gateway Timeout", Type: TypeTimeout, Stage: "ctx", Retryable: true}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if got := ParseError(c.status, []byte(c.body), "ctx"); *got != c.want {
				t.Errorf("got %+v, want %+v", *got, c.want)
			}
		})
	}
}

func TestErrorRoundTrip(t *testing.T) {
	e := Error{Code: 503, Message: "a\"b\x00", Type: "t", Param: "p", Stage: "place", Retryable: true, RequestID: "r", RetryAfter: 1500 * time.Millisecond}
	got := ParseError(503, e.Append(nil), "x")
	got.RequestID, got.RetryAfter = e.RequestID, e.RetryAfter
	if *got != e {
		t.Errorf("got %+v, want %+v", *got, e)
	}
	h := http.Header{}
	e.SetHeader(h)
	if h.Get("Retry-After") != "2" || !strings.Contains(string(e.Append(nil)), `"request_id":"r"`) {
		t.Errorf("header %v, body %s", h, e.Append(nil))
	}
}

func TestParseEvent(t *testing.T) {
	for body, want := range map[string]Error{
		`{"error":{"message":"m","type":"timeout_error","code":504,"stage":"gen","retryable":false}}`: {Code: 504, Message: "m", Type: TypeTimeout, Stage: "gen"},
		`{"error":{"message":"m","code":"429"}}`:                                                      {Code: 502, Message: "m", Type: TypeServer, Stage: "ctx", Retryable: true},
		`{"object":"error","message":"m","type":"BadRequestError","code":400}`:                        {Code: 400, Message: "m", Type: TypeInvalid, Stage: "ctx"},
		`{"error":{"message":"m","code":200}}`:                                                        {Code: 502, Message: "m", Type: TypeServer, Stage: "ctx", Retryable: true},
		`{"error":{"message":"m","type":"cancelled_error"}}`:                                          {Code: 503, Message: "it stopped: m", Type: TypeUnavailable, Stage: "ctx", Retryable: true},
	} {
		if got := ParseEvent([]byte(body), "ctx"); *got != want {
			t.Errorf("%s: got %+v, want %+v", body, *got, want)
		}
	}
}

func FuzzParseError(f *testing.F) {
	f.Add(500, []byte(`{"error":{"message":"m","param":7}}`))
	f.Add(400, []byte(`{"detail":"x"}`))
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		e := ParseError(status, body, "gen")
		if !json.Valid(e.Append(nil)) || e.Message == "" && http.StatusText(status) != "" {
			t.Errorf("%d %q: %+v", status, body, e)
		}
	})
}

func TestImpossibleLogprobIsANumber(t *testing.T) {
	if got := appendFloat(nil, float32(math.Inf(-1))); !json.Valid(got) {
		t.Errorf("got %s", got)
	}
}

func TestParseCtxAnswer(t *testing.T) {
	a, err := ParseCtxAnswer([]byte(`{"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3},"prompt_token_ids":[[1,2]],
		"choices":[{"finish_reason":"length","disaggregated_params":{"ctx_request_id":9007199254740993,"future":1.0}}]}`))
	if err != nil || !a.Choices[0].GoesOn() || a.Usage.PromptTokens != 2 || string(a.PromptTokenIDs) != "[[1,2]]" ||
		!strings.Contains(string(a.Choices[0].Disagg), `9007199254740993,"future":1.0`) {
		t.Errorf("got %+v, %v", a, err)
	}
	for bad, want := range map[string]string{
		`{"choices":[]}`:                               "context answer: no choices",
		`{"choices":null}`:                             "context answer: no choices",
		`{"choices":[{}]`:                              "context answer: malformed JSON at byte 15: want a comma or '}'",
		`{"choices":[{}]} x`:                           "context answer: malformed JSON at byte 17: data after the value",
		`{"choices":[7]}`:                              "context answer: malformed JSON at byte 12: want an object",
		`{"choices":[{"finish_reason":7}]}`:            "context answer: finish_reason: want a string",
		`{"choices":[{"message":{"content":[]}}]}`:     "context answer: content: want a string",
		`{"choices":[{}],"usage":{"total_tokens":-1}}`: "context answer: usage: want a usage object",
		`[]`: "context answer: malformed JSON at byte 0: want an object",
	} {
		if _, err := ParseCtxAnswer([]byte(bad)); err == nil || err.Error() != want {
			t.Errorf("%s: got %v, want %s", bad, err, want)
		}
	}
}

func FuzzParseCtxAnswer(f *testing.F) {
	f.Add([]byte(`{"usage":null,"choices":[{"text":"a","finish_reason":"length","disaggregated_params":{"first_gen_tokens":[1]},"logprobs":null}]}`))
	f.Add([]byte(`{"usage":{"prompt_tokens":2,"prompt_tokens_details":{"cached_tokens":1}},"choices":[{"message":{"content":"a","tool_calls":[]},"stop_reason":7}]}`))
	f.Fuzz(func(t *testing.T, in []byte) {
		a, err := ParseCtxAnswer(in)
		if err != nil {
			return
		}
		if !json.Valid(in) {
			t.Errorf("%q was accepted", in)
		}
		for _, c := range a.Choices {
			for _, part := range []json.RawMessage{c.Disagg, c.Stop, c.Logprobs, a.PromptTokenIDs} {
				if part != nil && !json.Valid(part) {
					t.Errorf("%q has the part %q", in, part)
				}
			}
		}
	})
}

func TestMerged(t *testing.T) {
	var m Merged
	if got := string(m.Append(nil)); got != "null" {
		t.Errorf("nothing: got %s", got)
	}
	m.Add([]byte(`{"tokens":["a"],"token_logprobs":[-1.0],"x":1}`))
	m.Add([]byte(`{"tokens":[],"token_logprobs":[],"x":2}`))
	m.Add([]byte(`{"tokens":["b","c"],"token_logprobs":[-2,-3]}`))
	m.Add([]byte(`{"tokens":null,"x":null}`))
	m.Add([]byte(`null`))
	if got, want := string(m.Append(nil)), `{"tokens":["a","b","c"],"token_logprobs":[-1.0,-2,-3],"x":2}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Workers whose chunk has no logprobs say null where others have an array.
func TestMergedNull(t *testing.T) {
	var m Merged
	for _, obj := range []string{`{"content":null,"refusal":null}`, `{"content":[1]}`, `{"content":null}`, `{"content":[],"refusal":null}`, `{"content":[2]}`} {
		m.Add([]byte(obj))
	}
	if got, want := string(m.Append(nil)), `{"content":[1,2],"refusal":null}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// A token without alternatives has null for them, and is a token all the same.
func TestMergedKeepsNullsOfAnArray(t *testing.T) {
	var m Merged
	for range 3 {
		m.Add([]byte(`{"tokens":["a"],"top_logprobs":[null]}`))
	}
	if got, want := string(m.Append(nil)), `{"tokens":["a","a","a"],"top_logprobs":[null,null,null]}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestMergedTakesArraysOfSpace(t *testing.T) {
	var m Merged
	for _, obj := range []string{`{"tokens":[ ]}`, `{"tokens":[ "a" ]}`, "{\"tokens\":[\n]}", `{"tokens":["b"]}`} {
		m.Add([]byte(obj))
	}
	if got, want := string(m.Append(nil)), `{"tokens":["a","b"]}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestRawPartsOfAnAnswer(t *testing.T) {
	got := string(head(true).AppendResponse(nil, []Choice{{RawText: []byte(`a\u00e9`), RawLogprobs: []byte(`{"content":[]}`), Finish: "stop"}}, Usage{}, nil))
	if !json.Valid([]byte(got)) || !strings.Contains(got, `"content":"a\u00e9"`) || !strings.Contains(got, `"logprobs":{"content":[]}`) {
		t.Errorf("got %s", got)
	}
}

func BenchmarkRewriteChunk(b *testing.B) {
	in := head(false).AppendChunk(nil, Choice{Text: " token", TokenIDs: []int32{12345}})
	rw := &Rewrite{ID: []byte(`"cmpl-2"`), Model: []byte(`"m"`)}
	var dst []byte
	b.ReportAllocs()
	for b.Loop() {
		_, dst, _ = RewriteChunk(dst[:0], in, false, rw)
	}
}

// TestParseUsage holds it against encoding/json, which knows no bounds, nor that a count is missing.
func TestParseUsage(t *testing.T) {
	for _, in := range []string{
		`{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}`,
		`{"prompt_tokens":null,"prompt_tokens_details":null,"more":[1]}`, `{}`, `[]`, `{"prompt_tokens":"1"}`, `{"total_tokens":1.5}`,
		`{"prompt_tokens_details":{"cached_tokens":"x"}}`, `{`,
	} {
		var want Usage
		wantErr := json.Unmarshal([]byte(in), &want)
		got, err := ParseUsage([]byte(in))
		if err == nil {
			for member, no := range map[string]bool{`"prompt_tokens":1`: got.NoPrompt, `"completion_tokens":2`: got.NoCompletion} {
				if no == strings.Contains(in, member) {
					t.Errorf("%s: %+v", in, got)
				}
			}
			want.NoPrompt, want.NoCompletion = got.NoPrompt, got.NoCompletion
		}
		if (err == nil) != (wantErr == nil) || err == nil && !reflect.DeepEqual(*got, want) {
			t.Errorf("%s: %+v, %v; want %+v, %v", in, got, err, want, wantErr)
		}
	}
}

func TestCountsOfTokensAreNotNegative(t *testing.T) {
	for _, in := range []string{`{"prompt_tokens":-1}`, `{"completion_tokens":-1}`, `{"total_tokens":-9}`, `{"prompt_tokens_details":{"cached_tokens":-1}}`} {
		if u, err := ParseUsage([]byte(in)); err == nil {
			t.Errorf("%s became %+v", in, u)
		}
	}
}

func TestLegParams(t *testing.T) {
	for _, p := range []LegParams{{Type: ContextOnly, ID: 1}, {Type: GenerationOnly, ID: 1 << 60, CtxID: 3, Style: GenerationFirst, Endpoint: `tcp://h"x:1`}} {
		var d DisaggParams
		if err := json.Unmarshal(p.Append(nil), &d); err != nil {
			t.Fatal(err)
		}
		if d.RequestType != p.Type || *d.DisaggRequestID != p.ID || *d.ScheduleStyle != p.Style ||
			(d.CtxRequestID != nil) != (p.CtxID != 0) || (d.CtxInfoEndpoint != nil) != (p.Endpoint != "") || p.Endpoint != "" && *d.CtxInfoEndpoint != p.Endpoint {
			t.Errorf("%+v became %+v", p, d)
		}
	}
}
