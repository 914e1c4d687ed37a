package proxy

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
)

const completion = `{"model":"m","prompt":"hi","stream":true,"stream_options":{"include_usage":true},"x":1.0}`

func TestGenerationFirst(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	admitted := make(chan struct{})
	c.nodes["gen0"].serve = func(w http.ResponseWriter, r *http.Request, l leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush() // admitted: the context leg may come now
		hold(r, admitted)
		streamTokens(w, l, "a", "b", "c")
	}
	c.nodes["ctx0"].serve = func(w http.ResponseWriter, r *http.Request, l leg) {
		answerCtx(w, l)
		close(admitted)
	}
	got := c.post("/v1/completions", completion, "X-Request-Id", "mine-1", "Traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
	if got.status != 200 || text(t, got.events, false) != "abc" || got.header.Get("X-Request-Id") != "mine-1" {
		t.Fatalf("got %d %q %v", got.status, got.body, got.header)
	}
	first, second := c.leg(), c.leg()
	if first.node != "gen0" || second.node != "ctx0" {
		t.Errorf("legs went to %s, then %s", first.node, second.node)
	}
	g, x := first.disagg, second.disagg
	if g.RequestType != api.GenerationOnly || x.RequestType != api.ContextOnly || *g.DisaggRequestID != *x.DisaggRequestID ||
		*g.CtxRequestID != *g.DisaggRequestID || *g.ScheduleStyle != 1 || *x.ScheduleStyle != 1 || *g.CtxInfoEndpoint != "tcp://10.0.0.1:700" {
		t.Errorf("gen %+v\nctx %+v", g, x)
	}
	for _, l := range []leg{first, second} {
		if string(l.body["prompt"]) != "[7,2]" || string(l.body["x"]) != "1.0" || l.body["seed"] == nil || l.path != "/v1/completions" {
			t.Errorf("%s got %s", l.node, l.raw)
		}
		for h, want := range map[string]string{
			"X-Request-Id": "mine-1", "X-Meridian-Router": "r0", "X-Meridian-Sub": "0", "X-Meridian-Attempt": "0", "X-Meridian-Streamed": "1",
			"Traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		} {
			if l.header.Get(h) != want {
				t.Errorf("%s: header %s is %q, want %q", l.node, h, l.header.Get(h), want)
			}
		}
	}
	if string(first.body["stream"]) != "true" || string(second.body["stream"]) != "false" || second.body["stream_options"] != nil {
		t.Errorf("gen %s\nctx %s", first.raw, second.raw)
	}
	checkStream(t, got)
	checkRecord(t, c, GenerationFirst)
}

// checkStream checks what every stream to a client looks like.
func checkStream(t *testing.T, got reply) {
	t.Helper()
	n := len(got.events)
	if n < 3 || got.events[n-1] != "[DONE]" {
		t.Fatalf("events %q", got.events)
	}
	usage := `"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5,"prompt_tokens_details":{"cached_tokens":1}}`
	if !strings.Contains(got.events[n-2], `"choices":[],`+usage) {
		t.Errorf("usage: %s", got.events[n-2])
	}
	ids := map[string]bool{}
	for _, e := range got.events[:n-1] {
		var chunk struct {
			ID, Model string
			Created   int64
		}
		if err := json.Unmarshal([]byte(e), &chunk); err != nil || chunk.Model != "m" || chunk.Created == 1 {
			t.Errorf("%s: %v", e, err)
		}
		ids[chunk.ID] = true
		if strings.Contains(e, "token_ids") || strings.Contains(e, "disaggregated_params") {
			t.Errorf("%s is not for clients", e)
		}
	}
	if len(ids) != 1 {
		t.Errorf("ids of one answer: %v", ids)
	}
}

func checkRecord(t *testing.T, c *cluster, style string) {
	t.Helper()
	records := c.settled()
	if len(records) != 1 {
		t.Fatalf("%d records", len(records))
	}
	r := records[0]
	s := r.Stamps
	if r.Role != phase.Disagg || r.Router != "r0" || r.Style != style || r.Outcome != phase.Finished || r.FinishReason != "stop" ||
		r.Tokens != (phase.Tokens{Prompt: 2, Cached: 1, Output: 3}) || r.Decision == nil || !r.Streamed {
		t.Errorf("record %+v", r)
	}
	order := []*int64{s.ReceiveNS, s.ParsedNS, s.PlacedNS, s.GenDispatchNS, s.GenHeadersNS, s.FirstTokenNS, s.FirstTokenSentNS, s.EndNS}
	if style == ContextFirst {
		order = []*int64{s.ReceiveNS, s.ParsedNS, s.PlacedNS, s.CtxDispatchNS, s.CtxDoneNS, s.GenDispatchNS, s.GenHeadersNS, s.FirstTokenNS, s.FirstTokenSentNS, s.EndNS}
	}
	for i := range order {
		if order[i] == nil || (i > 0 && *order[i] < *order[i-1]) {
			t.Errorf("stamp %d: %+v", i, s)
			break
		}
	}
}

func TestContextFirst(t *testing.T) {
	c := newCluster(t, ContextFirst, "ctx0", "gen0")
	got := c.post("/v1/completions", completion)
	if got.status != 200 || text(t, got.events, false) != "abc" {
		t.Fatalf("got %d %q", got.status, got.body)
	}
	first, second := c.leg(), c.leg()
	if first.node != "ctx0" || second.node != "gen0" || *first.disagg.ScheduleStyle != 0 {
		t.Errorf("legs went to %s, then %s", first.node, second.node)
	}
	d := string(second.body["disaggregated_params"])
	for _, want := range []string{
		`"request_type":"generation_only"`, `"first_gen_tokens":[5]`, `"encoded_opaque_state":"b3Bh"`, `"future":1.50`, `"schedule_style":0`,
		`"ctx_usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":1}}`,
	} {
		if !strings.Contains(d, want) {
			t.Errorf("%s is not in %s", want, d)
		}
	}
	checkStream(t, got)
	checkRecord(t, c, ContextFirst)
}

func TestContextFirstThatEndsAtTheFirstToken(t *testing.T) {
	c := newCluster(t, ContextFirst, "ctx0", "gen0")
	c.nodes["ctx0"].serve = func(w http.ResponseWriter, _ *http.Request, _ leg) {
		fmt.Fprint(w, `{"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3},"choices":[{"text":"é","finish_reason":"stop"}]}`)
	}
	got := c.post("/v1/completions", completion)
	if got.status != 200 || text(t, got.events, false) != "é" || !strings.Contains(got.body, `"completion_tokens":1`) || len(c.legs) != 1 {
		t.Errorf("got %d %q after %d legs", got.status, got.body, len(c.legs))
	}
	got = c.post("/v1/completions", `{"model":"m","prompt":"hi"}`)
	if got.status != 200 || !strings.Contains(got.body, `"text":"é"`) || !strings.Contains(got.body, `"finish_reason":"stop"`) {
		t.Errorf("got %d %q", got.status, got.body)
	}
	c.settled()
}

func TestAggregated(t *testing.T) {
	c := newCluster(t, Aggregated, "ctx0", "gen0")
	got := c.post("/v1/completions", completion)
	l := c.leg()
	if got.status != 200 || text(t, got.events, false) != "abc" || l.node != "gen0" || l.body["disaggregated_params"] != nil || len(c.legs) != 0 {
		t.Errorf("got %d %q, leg %+v", got.status, got.body, l)
	}
	if r := c.settled()[0]; r.Style != Aggregated || r.DisaggRequestID != 0 {
		t.Errorf("record %+v", r)
	}
}

func TestAutoServesAggregatedWithoutAPair(t *testing.T) {
	c := newCluster(t, Auto, "ctx0")
	if got := c.post("/v1/completions", completion); got.status != 200 {
		t.Errorf("got %d %q", got.status, got.body)
	}
	if r := c.settled()[0]; r.Style != Aggregated || !strings.Contains(r.Decision.Reason, "no pair") {
		t.Errorf("record %+v", r.Decision)
	}
}

func TestAnswerThatIsNotStreamed(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	got := c.post("/v1/completions", `{"model":"m","prompt":"hi","stream":false}`)
	want := `"object":"text_completion"`
	if got.status != 200 || !strings.Contains(got.body, `"text":"abc"`) || !strings.Contains(got.body, want) ||
		!strings.Contains(got.body, `"finish_reason":"stop"`) || !strings.Contains(got.body, `"completion_tokens":3`) || strings.Contains(got.body, "token_ids") {
		t.Errorf("got %d %q", got.status, got.body)
	}
	got = c.post("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}]}`)
	if got.status != 200 || !strings.Contains(got.body, `"message":{"role":"assistant","content":"abc"}`) {
		t.Errorf("got %d %q", got.status, got.body)
	}
	for _, r := range c.settled() {
		if r.Streamed || r.Stamps.FirstTokenSentNS != nil || r.Stamps.FirstTokenNS == nil {
			t.Errorf("record %+v", r)
		}
	}
}

func TestSeveralPromptsAndChoices(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	got := c.post("/v1/completions", `{"model":"m","prompt":["a","bb"],"n":2,"seed":40}`)
	var body struct {
		Choices []struct {
			Index int
			Text  string
		}
		Usage api.Usage
	}
	if err := json.Unmarshal([]byte(got.body), &body); err != nil || len(body.Choices) != 4 {
		t.Fatalf("%d %q: %v", got.status, got.body, err)
	}
	for i, ch := range body.Choices {
		if ch.Index != i || ch.Text != "abc" {
			t.Errorf("choice %d: %+v", i, ch)
		}
	}
	if u := body.Usage; u.PromptTokens != 4 || u.CompletionTokens != 12 || u.PromptTokensDetails.CachedTokens != 2 {
		t.Errorf("usage %+v", u)
	}
	seen := map[string]bool{}
	ids := map[int64]bool{}
	for range 8 {
		l := c.leg()
		seen[fmt.Sprintf("%s %s seed %s sub %s", l.node, l.body["prompt"], l.body["seed"], l.header.Get("X-Meridian-Sub"))] = true
		ids[*l.disagg.DisaggRequestID] = true
		if string(l.body["n"]) != "1" {
			t.Errorf("n is %s", l.body["n"])
		}
	}
	for _, want := range []string{
		"gen0 [7,1] seed 40 sub 0", "gen0 [7,1] seed 41 sub 1", "gen0 [7,2] seed 40 sub 2", "gen0 [7,2] seed 41 sub 3",
		"ctx0 [7,1] seed 40 sub 0", "ctx0 [7,1] seed 41 sub 1", "ctx0 [7,2] seed 40 sub 2", "ctx0 [7,2] seed 41 sub 3",
	} {
		if !seen[want] {
			t.Errorf("no leg %q in %v", want, seen)
		}
	}
	if len(ids) != 4 {
		t.Errorf("ids %v", ids)
	}
	if r := c.settled(); len(r) != 1 || len(r[0].Legs) != 8 || r[0].Tokens != (phase.Tokens{Prompt: 4, Cached: 2, Output: 12}) {
		t.Errorf("records %+v", r)
	}
}

func TestStreamOfSeveralChoices(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	got := c.post("/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"x"}],"n":3,"stream":true}`)
	texts := map[int]string{}
	for _, e := range got.events[:len(got.events)-1] {
		var chunk struct {
			Choices []struct {
				Index int
				Delta struct{ Content string }
			}
		}
		if err := json.Unmarshal([]byte(e), &chunk); err != nil {
			t.Fatal(err)
		}
		for _, ch := range chunk.Choices {
			texts[ch.Index] += ch.Delta.Content
		}
	}
	if len(texts) != 3 || texts[0] != "abc" || texts[1] != "abc" || texts[2] != "abc" {
		t.Errorf("got %v", texts)
	}
	c.settled()
}

func TestClientsCannotSetControlFields(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	got := c.post("/v1/completions", `{"model":"m","prompt":"hi","disaggregated_params":{"request_type":"generation_only","ctx_info_endpoint":"tcp://evil:1"},
		"output_token_ids":[1,2],"kv_transfer_params":{"remote_host":"evil"},"prompt_token_ids":[3]}`,
		"X-Meridian-Router", "evil", "X-Meridian-Attempt", "9", "Traceparent", "evil")
	if got.status != 200 {
		t.Fatalf("got %d %q", got.status, got.body)
	}
	for _, l := range c.taken(2) {
		if strings.Contains(l.raw, "evil") || strings.Contains(l.raw, "output_token_ids") || l.header.Get("X-Meridian-Router") != "r0" ||
			l.header.Get("X-Meridian-Attempt") != "0" || l.header.Get("Traceparent") != "" {
			t.Errorf("%s got %s %v", l.node, l.raw, l.header)
		}
	}
}

func TestForeignWorkersGetTheClientsText(t *testing.T) {
	c := newCluster(t, Auto)
	for _, name := range []string{"ctx0", "gen0"} {
		f := c.add(name)
		c.pool.Drop(f.role, name, "it is made foreign")
		c.pool.PutForeign(f.role, name, f.srv.URL, "m")
	}
	got := c.post("/v1/completions", completion)
	if got.status != 200 || text(t, got.events, false) != "abc" {
		t.Fatalf("got %d %q", got.status, got.body)
	}
	legs := c.taken(2)
	if string(legs["ctx0"].body["prompt"]) != `"hi"` || legs["ctx0"].body["seed"] != nil {
		t.Errorf("ctx got %s", legs["ctx0"].raw)
	}
	if string(legs["gen0"].body["prompt"]) != `[[7,8]]` || *legs["gen0"].disagg.ScheduleStyle != 0 {
		t.Errorf("gen got %s", legs["gen0"].raw)
	}
}

// TestWhatForeignWorkersDoNotTellIsNotZero: a count that no worker gave is null for the client and absent for the record.
func TestWhatForeignWorkersDoNotTellIsNotZero(t *testing.T) {
	for _, k := range []struct {
		name, usage string // of both workers
		prompt      string // of the request
		want        string
		tokens      phase.Tokens
	}{
		{"nothing", ``, `"hello"`, `{"prompt_tokens":null,"completion_tokens":2,"total_tokens":null}`, phase.Tokens{Output: 2, NoPrompt: true, NoCached: true}},
		{"null", `,"usage":null`, `"hello"`, `{"prompt_tokens":null,"completion_tokens":2,"total_tokens":null}`, phase.Tokens{Output: 2, NoPrompt: true, NoCached: true}},
		{"a part", `,"usage":{"completion_tokens":9,"prompt_tokens":null}`, `"hello"`, `{"prompt_tokens":null,"completion_tokens":9,"total_tokens":null}`, phase.Tokens{Output: 9, NoPrompt: true, NoCached: true}},
		{"nothing of a prompt of ids", ``, `[4,5,6]`, `{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}`, phase.Tokens{Prompt: 3, Output: 2, NoCached: true}},
		{"all", `,"usage":{"prompt_tokens":8,"completion_tokens":9,"total_tokens":17,"prompt_tokens_details":{"cached_tokens":0}}`, `"hello"`,
			`{"prompt_tokens":8,"completion_tokens":9,"total_tokens":17,"prompt_tokens_details":{"cached_tokens":0}}`, phase.Tokens{Prompt: 8, Output: 9}},
	} {
		t.Run(k.name, func(t *testing.T) {
			c := newCluster(t, ContextFirst, "ctx0", "gen0")
			for name, f := range c.nodes {
				c.pool.Drop(f.role, name, "it is made foreign")
				c.pool.PutForeign(f.role, name, f.srv.URL, "m")
			}
			c.nodes["ctx0"].serve = func(w http.ResponseWriter, _ *http.Request, l leg) {
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprintf(w, `{"id":"x","choices":[{"index":0,"text":"a","finish_reason":"length","disaggregated_params":{"request_type":"context_only",
					"ctx_request_id":1,"disagg_request_id":%d}}]%s}`, *l.disagg.DisaggRequestID, k.usage)
			}
			c.nodes["gen0"].serve = func(w http.ResponseWriter, _ *http.Request, _ leg) {
				w.Header().Set("Content-Type", "text/event-stream")
				fmt.Fprintf(w, "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"text\":\"a\"}]}\n\ndata: {\"id\":\"x\",\"choices\":[{\"index\":0,\"text\":\"b\",\"finish_reason\":\"stop\"}]%s}\n\ndata: [DONE]\n\n", k.usage)
			}
			got := c.post("/v1/completions", `{"model":"m","prompt":`+k.prompt+`,"stream":true,"stream_options":{"include_usage":true}}`)
			if n := len(got.events); got.status != 200 || n < 3 || !strings.HasSuffix(got.events[n-2], `"usage":`+k.want+"}") {
				t.Errorf("got %d %q, want the usage %s", got.status, got.body, k.want)
			}
			if r := c.settled(); len(r) != 1 || r[0].Tokens != k.tokens {
				t.Errorf("the record has %+v, want %+v", r[0].Tokens, k.tokens)
			}
		})
	}
}

func TestRefusalsReachNoNode(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	cases := []struct {
		name, body string
		headers    []string
		status     int
		param      string
	}{
		{"malformed JSON", `{`, nil, 400, ""},
		{"an unknown model", `{"model":"z","prompt":"x"}`, nil, 404, "model"},
		{"an empty prompt", `{"model":"m","prompt":""}`, nil, 400, "prompt"},
		{"an id outside the vocabulary", `{"model":"m","prompt":[5000]}`, nil, 400, "prompt"},
		{"prompt and max_tokens over the context", `{"model":"m","prompt":"x","max_tokens":99}`, nil, 400, "max_tokens"},
		{"a body over the limit", `{"model":"m","prompt":"` + strings.Repeat("x", 1<<20) + `"}`, nil, 413, ""},
		{"a bad request id", `{"model":"m","prompt":"x"}`, []string{"X-Request-Id", "a b\"<script>"}, 400, "X-Request-Id"},
	}
	for _, k := range cases {
		t.Run(k.name, func(t *testing.T) {
			got := c.post("/v1/completions", k.body, k.headers...)
			var e struct {
				Error struct {
					Message, Type string
					Param         *string
					RequestID     string `json:"request_id"`
				}
			}
			if err := json.Unmarshal([]byte(got.body), &e); err != nil || got.status != k.status || e.Error.Message == "" {
				t.Fatalf("got %d %q", got.status, got.body)
			}
			if (e.Error.Param == nil) != (k.param == "") || (e.Error.Param != nil && *e.Error.Param != k.param) {
				t.Errorf("got %s", got.body)
			}
			if e.Error.RequestID == "" || e.Error.RequestID != got.header.Get("X-Request-Id") {
				t.Errorf("request id %q, header %q", e.Error.RequestID, got.header.Get("X-Request-Id"))
			}
		})
	}
	if len(c.legs) != 0 {
		t.Errorf("%d legs were sent", len(c.legs))
	}
}

func TestNoPairIsNotNow(t *testing.T) {
	c := newCluster(t, GenerationFirst, "ctx0")
	got := c.post("/v1/completions", completion)
	if got.status != 503 || got.header.Get("Retry-After") != "1" || !strings.Contains(got.body, `"stage":"place"`) || !strings.Contains(got.body, `"retryable":true`) {
		t.Errorf("got %d %v %q", got.status, got.header, got.body)
	}
	if r := c.settled()[0]; r.Outcome != phase.Rejected || r.Error.Stage != "place" {
		t.Errorf("record %+v", r)
	}
}

func TestModelsAndCluster(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	get := func(path string, into any) {
		t.Helper()
		res, err := http.Get(c.url + path)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if err := json.NewDecoder(res.Body).Decode(into); err != nil || res.StatusCode != 200 {
			t.Fatalf("%s: %d, %v", path, res.StatusCode, err)
		}
	}
	var models struct{ Data []struct{ ID string } }
	if get("/v1/models", &models); len(models.Data) != 1 || models.Data[0].ID != "m" {
		t.Errorf("got %+v", models)
	}
	var cl struct {
		Nodes []struct {
			Name, Role, URL, State string
			Clock                  struct {
				OffsetNS *int64 `json:"offset_ns"`
				State    string
			}
			Ranks []ClusterRank
		}
	}
	ranks := []infer.Load{{Running: 3, Waiting: 1, WaitingTokens: 700, KVUsedBlocks: 5, KVMaxBlocks: 9}, {Running: 1, KVMaxBlocks: 9}}
	c.pool.Report(node.Report{Role: node.RoleGen, Name: "gen0", Seq: 1, Load: infer.Load{Running: 4}, Ranks: ranks})
	get("/cluster", &cl)
	if want := []ClusterRank{{0, 3, 1, 700, 5, 9}, {1, 1, 0, 0, 0, 9}}; len(cl.Nodes) == 2 && (!slices.Equal(cl.Nodes[1].Ranks, want) || cl.Nodes[0].Ranks != nil) {
		t.Errorf("ranks %+v, want %+v of gen0", cl.Nodes, want)
	}
	if len(cl.Nodes) != 2 || cl.Nodes[0].Name != "ctx0" || cl.Nodes[1].Role != "gen" || cl.Nodes[0].State != string(node.Ready) ||
		cl.Nodes[0].Clock.OffsetNS != nil || cl.Nodes[0].Clock.State != "not_aligned" {
		t.Errorf("got %+v", cl)
	}
}

func TestToolCallsOfAForeignWorkerAreKept(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0")
	c.pool.PutForeign(node.RoleGen, "far", c.nodes["gen0"].srv.URL, "far-model")
	c.nodes["gen0"].serve = func(w http.ResponseWriter, r *http.Request, l leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		for _, d := range []string{
			`{"role":"assistant","reasoning_content":"hm"}`, `{"tool_calls":[{"index":0,"id":"c1","type":"function","function":{"name":"f","arguments":"{"}}]}`,
			`{"tool_calls":[{"index":0,"function":{"arguments":"}"}}]}`,
		} {
			fmt.Fprintf(w, "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"delta\":%s,\"finish_reason\":null}]}\n\n", d)
		}
		fmt.Fprint(w, "data: {\"id\":\"x\",\"choices\":[{\"index\":0,\"delta\":{},\"finish_reason\":\"tool_calls\"}]}\n\ndata: [DONE]\n\n")
	}
	body := `{"model":"far-model","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f"}}],"response_format":{"type":"json_object"}`
	got := c.post("/v1/chat/completions", body+"}")
	want := `"message":{"role":"assistant","content":null,"reasoning_content":"hm","tool_calls":[{"id":"c1","type":"function","function":{"name":"f","arguments":"{}"}}]}`
	if got.status != 200 || !strings.Contains(got.body, want) || !strings.Contains(got.body, `"finish_reason":"tool_calls"`) {
		t.Errorf("whole answer: %d %s", got.status, got.body)
	}
	if l := c.leg(); l.body["tools"] == nil || l.body["response_format"] == nil {
		t.Errorf("the worker got %s", l.raw)
	}
	if got := c.post("/v1/chat/completions", body+`,"stream":true}`); !strings.Contains(got.body, `"reasoning_content":"hm"`) || !strings.Contains(got.body, `"arguments":"}"`) {
		t.Errorf("stream: %s", got.body)
	}
	if got := c.post("/v1/chat/completions", strings.Replace(body, "far-model", "m", 1)+"}"); got.status != 400 || !strings.Contains(got.body, `"param":"tools"`) {
		t.Errorf("nodes that cannot call tools: %d %s", got.status, got.body)
	}
}
