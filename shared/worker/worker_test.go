package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// joined is what a stream says: the text, the ids and the finish reason of each choice, and how it ended.
type joined struct {
	text, finish map[int]string
	ids          map[int]int
	usage        *api.Usage
	failed       string
	done         bool
}

func join(t *testing.T, body string) joined {
	t.Helper()
	j := joined{text: map[int]string{}, finish: map[int]string{}, ids: map[int]int{}}
	for _, ev := range strings.Split(strings.TrimSpace(body), "\n\n") {
		data := strings.TrimPrefix(ev, "data: ")
		if data == "[DONE]" {
			j.done = true
			continue
		}
		var c struct {
			Choices []struct {
				Index int
				Text  string
				Delta struct{ Content string }
				IDs   []int32 `json:"token_ids"`
				Fin   string  `json:"finish_reason"`
			}
			Usage *api.Usage
			Error *struct{ Message string }
		}
		if err := json.Unmarshal([]byte(data), &c); err != nil {
			t.Fatalf("event %q: %v", data, err)
		}
		if c.Error != nil {
			j.failed = c.Error.Message
		}
		if c.Usage != nil {
			j.usage = c.Usage
		}
		for _, ch := range c.Choices {
			j.text[ch.Index] += ch.Text + ch.Delta.Content
			j.ids[ch.Index] += len(ch.IDs)
			j.finish[ch.Index] += ch.Fin
		}
	}
	return j
}

func TestAStreamSaysTheWholeTextAndEnds(t *testing.T) {
	for _, c := range []struct {
		name, path, body string
		text, finish     string
		choices          int
	}{
		{"a completion", "/v1/completions", `{"model":"tiny","prompt":"a","stream":true}`, "The quick brown fox jumps.", "stop", 1},
		{"token ids as prompt", "/v1/completions", `{"model":"tiny","prompt":[5,6],"stream":true}`, "The quick brown fox jumps.", "stop", 1},
		{"two choices of two prompts", "/v1/completions", `{"model":"tiny","prompt":["a","b"],"n":2,"stream":true}`, "The quick brown fox jumps.", "stop", 4},
		{"a stop string", "/v1/completions", `{"model":"tiny","prompt":"a","stop":"wn f","stream":true}`, "The quick bro", "stop", 1},
		{"a stop string that never comes", "/v1/completions", `{"model":"tiny","prompt":"a","stop":"jumps!","stream":true}`, "The quick brown fox jumps.", "stop", 1},
		{"chat with prompt_token_ids", "/v1/chat/completions", `{"model":"tiny","messages":[{"role":"user","content":"x"}],"prompt_token_ids":[7],"stream":true}`, "The quick brown fox jumps.", "stop", 1},
	} {
		f := newFake(t)
		status, body := f.post(t, c.path, c.body)
		j := join(t, body)
		if status != http.StatusOK || len(j.text) != c.choices || !j.done {
			t.Errorf("%s: status %d, %d choices, done %v: %s", c.name, status, len(j.text), j.done, body)
		}
		for i, text := range j.text {
			if text != c.text || j.finish[i] != c.finish {
				t.Errorf("%s: choice %d says %q (%s), want %q (%s)", c.name, i, text, j.finish[i], c.text, c.finish)
			}
		}
		if len(f.records) != c.choices {
			t.Errorf("%s: %d records", c.name, len(f.records))
		}
	}
}

func TestBadRequestsAreRefusedByFieldAndRecorded(t *testing.T) {
	long := strings.Repeat("1,", 200) + "1"
	for _, c := range []struct {
		name, body string
		header     []string
		status     int
		want       string
	}{
		{"no JSON", `{`, nil, 400, "JSON"},
		{"another model", `{"model":"x","prompt":"a"}`, nil, 404, "model"},
		{"a prompt beyond the context", `{"model":"tiny","prompt":[` + long + `]}`, nil, 400, "context"},
		{"more tokens than the context", `{"model":"tiny","prompt":"a","max_tokens":500}`, nil, 400, "max_tokens"},
		{"an unknown request type", `{"model":"tiny","prompt":"a","disaggregated_params":{"request_type":"x"}}`, nil, 400, "request_type"},
		{"a leg without id", `{"model":"tiny","prompt":"a","disaggregated_params":{"request_type":"context_only"}}`, nil, 400, "disagg_request_id"},
		{"a leg with two choices", `{"model":"tiny","prompt":"a","n":2,"disaggregated_params":{"request_type":"context_only","disagg_request_id":7}}`, nil, 400, "one prompt"},
		{"a bad deadline", `{"model":"tiny","prompt":"a"}`, []string{api.HeaderDeadline, "soon"}, 400, "Deadline"},
		{"nothing left to say", `{"model":"tiny","prompt":"a","max_tokens":1,"output_token_ids":[5],"disaggregated_params":{"request_type":"context_and_generation"}}`, nil, 400, "output_token_ids"},
	} {
		f := newFake(t)
		status, body := f.post(t, "/v1/completions", c.body, c.header...)
		if status != c.status || !strings.Contains(body, c.want) || !strings.Contains(body, `"error"`) {
			t.Errorf("%s: %d %s, want %d and %q", c.name, status, body, c.status, c.want)
		}
		if r := f.record(t); r.Outcome != phase.Rejected || r.Error == nil {
			t.Errorf("%s: record %+v", c.name, r)
		}
		if len(f.legs) != 0 {
			t.Errorf("%s: a leg was started", c.name)
		}
	}
}

func TestAGenerationLegCarriesItsHeadersIntoTheRecord(t *testing.T) {
	f := newFake(t)
	_, body := f.post(t, "/v1/completions", `{"model":"tiny","prompt":[5,6,7],"stream":true,"stream_options":{"include_usage":true},"max_tokens":9,
		"disaggregated_params":{"request_type":"generation_only","disagg_request_id":9007199254740993,"ctx_request_id":9007199254740993,"schedule_style":1,
		"ctx_usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4,"prompt_tokens_details":{"cached_tokens":2}}}}`,
		api.HeaderRouter, "r0", api.HeaderRouterRequest, "q1", api.HeaderRequestID, "mine", api.HeaderSub, "2", api.HeaderAttempt, "1",
		api.HeaderStreamed, "0", api.HeaderProbe, "1", api.HeaderDeadline, "60000", api.HeaderTraceparent, "00-a-b-01")
	j := join(t, body)
	n := len(f.o.Tokenizer.Encode(f.say, false))
	if j.ids[0] != n || j.usage == nil || j.usage.PromptTokens != 3 || j.usage.CompletionTokens != n || j.usage.PromptTokensDetails.CachedTokens != 2 {
		t.Errorf("ids %d of %d, usage %+v", j.ids[0], n, j.usage)
	}
	r := f.record(t)
	if r.Router != "r0" || r.RequestID != "q1" || r.ClientRequestID != "mine" || r.Sub != 2 || r.Attempt != 1 || r.Streamed || !r.Probe ||
		r.DisaggRequestID != 9007199254740993 || r.Style != "generation_first" || r.Traceparent != "00-a-b-01" || r.Outcome != phase.Finished {
		t.Errorf("record %+v", r)
	}
	s := r.Stamps
	for name, at := range map[string]*int64{"receive": s.ReceiveNS, "parsed": s.ParsedNS, "admitted": s.AdmittedNS, "headers": s.HeadersSentNS,
		"queued": s.QueuedNS, "scheduled": s.FirstScheduledNS, "first": s.FirstTokenNS, "sent": s.FirstTokenSentNS, "last": s.LastTokenNS, "end": s.EndNS} {
		if at == nil {
			t.Errorf("stamp %s is missing", name)
		}
	}
	if l := f.legs[0]; l.Request.ID != 9007199254740993 || l.Request.DeadlineNS == 0 || l.Limit != time.Minute || l.Request.MaxTokens != 9 {
		t.Errorf("leg %+v", l.Request)
	}
}

func TestAContextLegAnswersWithItsParamsAndItsRecordWaitsForTheHandover(t *testing.T) {
	f := newFake(t)
	f.reason = infer.FinishLength
	release := make(chan struct{})
	f.o.Context = func(ctx context.Context, l *Leg) (Sequence, error) {
		l.Settle = func() *phase.Error {
			<-release
			l.Transfer = &phase.Transfer{Bytes: 77}
			return &phase.Error{Stage: "kv", Message: "gone"}
		}
		return f.run(ctx, l)
	}
	status, body := f.post(t, "/v1/completions", `{"model":"tiny","prompt":[5,6,7],"disaggregated_params":{"request_type":"context_only","disagg_request_id":12}}`)
	a, err := api.ParseCtxAnswer([]byte(body))
	if status != 200 || err != nil || !a.Choices[0].GoesOn() || string(a.PromptTokenIDs) != "[5,6,7]" || len(a.Choices[0].Disagg) == 0 {
		t.Fatalf("%d %v %s", status, err, body)
	}
	if len(f.records) != 0 {
		t.Error("the record did not wait")
	}
	close(release)
	if err := f.Wait(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := f.record(t); r.Transfer == nil || r.Transfer.Bytes != 77 || r.Outcome != phase.Failed || r.Error.Stage != "kv" {
		t.Errorf("record %+v", r)
	}
}

func TestAResumedLegGoesOnExactly(t *testing.T) {
	f := newFake(t)
	all := f.o.Tokenizer.Encode(f.say, false)
	const stop = "x j" // spans tokens, so that text is held back where the attempts meet
	_, whole := f.post(t, "/v1/completions", `{"model":"tiny","prompt":[5],"stream":true,"stop":["`+stop+`"],"max_tokens":50}`)
	for k := 1; k < len(all); k++ {
		before := newText(f.o.Tokenizer, &api.Request{Stop: []string{stop}}, nil)
		var head string
		for _, id := range all[:k] {
			head += before.take(id)
		}
		if before.ended {
			break
		}
		given, _ := json.Marshal(all[:k])
		_, body := f.post(t, "/v1/completions", `{"model":"tiny","prompt":[5],"stream":true,"stop":["`+stop+`"],"max_tokens":50,"output_token_ids":`+string(given)+
			`,"disaggregated_params":{"request_type":"context_and_generation"}}`, api.HeaderRouter, "r0")
		if got := head + join(t, body).text[0]; got != join(t, whole).text[0] || strings.Contains(body, `"role"`) {
			t.Errorf("resumed after %d tokens it says %q, want %q", k, got, join(t, whole).text[0])
		}
	}
}

// Offsets are those of characters: where a token's text begins, or the character that it is a part of.
func TestOffsetsCountCharacters(t *testing.T) {
	f := newFake(t)
	n := 1
	all := f.o.Tokenizer.Encode("é🜁a", false)
	x := newText(f.o.Tokenizer, &api.Request{Logprobs: &n}, nil)
	for _, id := range all {
		before := utf8.RuneCountInString(f.o.Tokenizer.Decode(all[:x.tokens], true))
		p := x.push([]infer.Token{{ID: id}}, nil)
		if got := p.logprobs[0].Offset; got > before || got < before-1 { // parts of a character count as one in before
			t.Errorf("token %d: %d, and %d characters are before it", x.tokens, got, before)
		}
	}
	if x.decoded != 3 {
		t.Errorf("three characters end at %d", x.decoded)
	}
}

func TestATokenBehindABrokenCharacterIsBehindIt(t *testing.T) {
	f := newFake(t)
	x := newText(f.o.Tokenizer, &api.Request{Logprobs: new(int)}, nil)
	broken, a := f.o.Tokenizer.Encode("🜁", false)[0], f.o.Tokenizer.Encode("a", false)[0]
	p := x.push([]infer.Token{{ID: a}, {ID: broken}, {ID: a}, {ID: a}}, nil)
	for i, want := range []int{0, 1, 2, 3} {
		if got := p.logprobs[i].Offset; got != want {
			t.Errorf("token %d of %q: %d, want %d", i, p.text, got, want)
		}
	}
}

// TestAResumedLegGoesOnInsideACharacter: bytes of a character that were held back when the first attempt broke come with the
// rest of it, once.
func TestAResumedLegGoesOnInsideACharacter(t *testing.T) {
	f := newFake(t)
	f.say = "a🜁é\u2028b"
	all := f.o.Tokenizer.Encode(f.say, false)
	inside := 0
	for k := 1; k < len(all); k++ {
		before := newText(f.o.Tokenizer, &api.Request{}, nil)
		var head string
		for _, id := range all[:k] {
			head += before.take(id)
		}
		if !utf8.ValidString(head) {
			t.Errorf("after %d tokens %q was sent", k, head)
		}
		if head != f.o.Tokenizer.Decode(all[:k], true) {
			inside++
		}
		given, _ := json.Marshal(all[:k])
		_, body := f.post(t, "/v1/completions", `{"model":"tiny","prompt":[5],"stream":true,"max_tokens":50,"output_token_ids":`+string(given)+
			`,"disaggregated_params":{"request_type":"context_and_generation"}}`, api.HeaderRouter, "r0")
		if got := head + join(t, body).text[0]; got != f.say {
			t.Errorf("resumed after %d tokens it says %q, want %q", k, got, f.say)
		}
	}
	if inside == 0 {
		t.Errorf("no cut lies inside a character: %d tokens", len(all))
	}
}

func TestFailuresSayWhatAndAreRecorded(t *testing.T) {
	for _, c := range []struct {
		name    string
		set     func(f *fake)
		body    string
		status  int
		outcome phase.Outcome
		want    string
	}{
		{"a full queue", func(f *fake) { f.fail = api.Unavailable("engine", time.Second, "the queue is full") }, `{"model":"tiny","prompt":"a","stream":true}`, 503, phase.Rejected, "queue is full"},
		{"a start that breaks", func(f *fake) { f.fail = errors.New("boom") }, `{"model":"tiny","prompt":"a"}`, 500, phase.Failed, "boom"},
		{"a device that breaks in a stream", func(f *fake) { f.breaks = errors.New("boom") }, `{"model":"tiny","prompt":"a","stream":true}`, 200, phase.Failed, "boom"},
		{"a device that breaks in a whole answer", func(f *fake) { f.breaks = errors.New("boom") }, `{"model":"tiny","prompt":"a"}`, 500, phase.Failed, "boom"},
	} {
		f := newFake(t)
		c.set(f)
		status, body := f.post(t, "/v1/completions", c.body)
		if status != c.status || !strings.Contains(body, c.want) || strings.Contains(body, "[DONE]") {
			t.Errorf("%s: %d %s", c.name, status, body)
		}
		if r := f.record(t); r.Outcome != c.outcome || r.Error == nil || !strings.Contains(r.Error.Message, c.want) {
			t.Errorf("%s: record %+v", c.name, r)
		}
	}
}

func TestAClientThatGoesAwayCancelsItsSequences(t *testing.T) {
	f := newFake(t)
	f.hang = true
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, f.srv.URL+"/v1/completions", strings.NewReader(`{"model":"tiny","prompt":"a","n":3,"stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	cancel()
	f.srv.Close() // waits for the handlers
	if f.cancels != 3 || len(f.records) != 3 {
		t.Fatalf("%d sequences were cancelled, %d recorded", f.cancels, len(f.records))
	}
	for _, r := range f.records {
		if r.Outcome != phase.Cancelled {
			t.Errorf("outcome %s, want cancelled", r.Outcome)
		}
	}
}

func TestAWholeAnswerCountsAndNamesEverything(t *testing.T) {
	f := newFake(t)
	_, body := f.post(t, "/v1/completions", `{"model":"tiny","prompt":[5,6,7,8],"n":2,"logprobs":1}`)
	var a struct {
		Choices []struct {
			Text     string
			Finish   string `json:"finish_reason"`
			Logprobs struct{ Tokens []string }
		}
		Usage api.Usage
	}
	if err := json.Unmarshal([]byte(body), &a); err != nil {
		t.Fatal(err)
	}
	n := len(f.o.Tokenizer.Encode(f.say, false))
	if len(a.Choices) != 2 || a.Choices[1].Text != f.say || strings.Join(a.Choices[0].Logprobs.Tokens, "") != f.say ||
		a.Usage.PromptTokens != 4 || a.Usage.CompletionTokens != 2*n || a.Usage.TotalTokens != 4+2*n {
		t.Errorf("%s", body)
	}
	if strings.Contains(body, "token_ids") {
		t.Error("a direct answer names token_ids")
	}
	if a, b := f.legs[0].Request, f.legs[1].Request; a.ID == b.ID || a.Sampling.Seed == b.Sampling.Seed {
		t.Errorf("two choices share id %d or seed %d", a.ID, a.Sampling.Seed)
	}
}

func TestTheOtherRoutesAnswer(t *testing.T) {
	f := newFake(t)
	for path, want := range map[string]string{
		"/v1/models": `"id":"tiny"`, "/health": "", "/server_info": `"role":"gen"`, "/iteration_stats?after=5": `"enabled":false`,
		"/tokenizer": `"hash":"h"`, "/steady_clock_offset": `"receive_ts"`,
	} {
		resp, err := http.Get(f.srv.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		_ = resp.Write(&b)
		if resp.StatusCode != 200 || !strings.Contains(b.String(), want) {
			t.Errorf("%s: %d, want %q in %.200s", path, resp.StatusCode, want, b.String())
		}
	}
}

func TestChatIsRenderedByTheModelsTemplate(t *testing.T) {
	for _, c := range []struct {
		name           string
		config, file   string
		body, rendered string // "": refused
	}{
		{"the template of tokenizer_config.json", `{"chat_template":"{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}`, "", `{"role":"user","content":"hi"}`, "<user>hi"},
		{"a file of its own wins", `{"chat_template":"x"}`, "y{{ messages[0].content }}", `{"role":"user","content":"hi"}`, "yhi"},
		{"a template that refuses", `{"chat_template":"{{ raise_exception('no') }}"}`, "", `{"role":"user","content":"hi"}`, ""},
		{"no template", `{}`, "", `{"role":"user","content":"hi"}`, ""},
		{"more messages than the context has tokens", `{"chat_template":"x"}`, "", strings.Repeat(`{"role":"user"},`, 200) + `{"role":"user"}`, ""},
	} {
		f := newFake(t)
		m := f.o.Model
		m.ConfigJSON, m.ChatTemplate = []byte(c.config), nil
		if c.file != "" {
			m.ChatTemplate = []byte(c.file)
		}
		var err error
		if f.o.Render, err = chatOf(m); err != nil {
			t.Fatal(err)
		}
		status, body := f.post(t, "/v1/chat/completions", `{"model":"tiny","messages":[`+c.body+`]}`)
		if c.rendered == "" {
			if status != http.StatusBadRequest || !strings.Contains(body, `"messages"`) {
				t.Errorf("%s: %d %s", c.name, status, body)
			}
			continue
		}
		if status != http.StatusOK || f.o.Tokenizer.Decode(f.legs[0].Request.Prompt, true) != c.rendered {
			t.Errorf("%s: %d, the prompt is %v, want %q", c.name, status, f.legs, c.rendered)
		}
	}
}

// TestARequestThatIsCutSaysWhy: who stops a node is not the request's client, and its time is not over either.
func TestARequestThatIsCutSaysWhy(t *testing.T) {
	n := &Node{o: Options{Role: phase.Gen}}
	left, leave := context.WithCancel(t.Context())
	leave()
	late, end := context.WithTimeout(t.Context(), 0)
	defer end()
	stopped, stop := context.WithCancelCause(t.Context())
	stop(api.Unavailable("", time.Second, "it stops"))
	below, cancel := context.WithTimeout(stopped, time.Hour)
	defer cancel()
	for want, ctx := range map[string]context.Context{
		"499 cancelled_error false": left, "504 timeout_error false": late, "503 service_unavailable_error true": below,
	} {
		e := n.explain(ctx, ctx.Err())
		if got := fmt.Sprint(e.Code, " ", e.Type, " ", e.Retryable); got != want || e.Stage != "gen" {
			t.Errorf("got %s at %s, want %s", got, e.Stage, want)
		}
	}
}

// Names of a router's headers become parts of a subject: one that is too long is refused before it is in a record.
func TestLongNamesOfARouterAreRefused(t *testing.T) {
	f := newFake(t)
	for _, header := range []string{api.HeaderRouter, api.HeaderRouterRequest} {
		status, body := f.post(t, "/v1/completions", `{"model":"tiny","prompt":[5],"max_tokens":1}`, header, strings.Repeat("x", maxOriginName+1))
		if status != 400 || !strings.Contains(body, header) {
			t.Errorf("%s: %d %s", header, status, body)
		}
	}
}
