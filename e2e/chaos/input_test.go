package chaos

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"meridian.internal/e2e/cluster"
)

const maxBody = 1 << 20 // --max-body of the router

func TestBadInputIsRefusedByTheFieldAndGoesNowhere(t *testing.T) {
	const completions, chat = "/v1/completions", "/v1/chat/completions"
	long := strings.TrimSuffix(strings.Repeat("11,", 9000), ",")
	cases := []struct {
		name, path, body string
		status           int
		param, message   string // message: a part of it; "" of param: the body as a whole is at fault
	}{
		{"no JSON", completions, `{"model":"meridian-tiny","prompt":`, 400, "", "JSON"},
		{"JSON that is no object", completions, `[1,2]`, 400, "", "JSON object"},
		{"an empty body", chat, ``, 400, "", "JSON"},
		{"no model", completions, `{"prompt":"a"}`, 400, "model", "missing"},
		{"an unknown model", completions, `{"model":"nobody","prompt":"a"}`, 404, "model", "nobody"},
		{"an unknown model of a chat", chat, `{"model":"nobody","messages":[{"role":"user","content":"a"}]}`, 404, "model", "nobody"},
		{"a model that is a number", completions, `{"model":1,"prompt":"a"}`, 400, "model", "string"},
		{"no prompt", completions, `{"model":"meridian-tiny"}`, 400, "prompt", "missing"},
		{"an empty prompt", completions, `{"model":"meridian-tiny","prompt":""}`, 400, "prompt", "empty"},
		{"an empty list of ids", completions, `{"model":"meridian-tiny","prompt":[]}`, 400, "prompt", ""},
		{"a prompt that is an object", completions, `{"model":"meridian-tiny","prompt":{}}`, 400, "prompt", ""},
		{"an id outside the vocabulary", completions, `{"model":"meridian-tiny","prompt":[1,999999999]}`, 400, "prompt", "vocabulary"},
		{"a negative id", completions, `{"model":"meridian-tiny","prompt":[-1]}`, 400, "prompt", ""},
		{"a prompt longer than the context", completions, `{"model":"meridian-tiny","prompt":[` + long + `]}`, 400, "prompt", "9000"},
		{"a chat without messages", chat, `{"model":"meridian-tiny"}`, 400, "messages", "missing"},
		{"a chat with no message", chat, `{"model":"meridian-tiny","messages":[]}`, 400, "messages", "empty"},
		{"a message without a role", chat, `{"model":"meridian-tiny","messages":[{"content":"a"}]}`, 400, "messages[0].role", "missing"},
		{"a negative max_tokens", completions, `{"model":"meridian-tiny","prompt":"a","max_tokens":-1}`, 400, "max_tokens", ""},
		{"a max_tokens of 0", completions, `{"model":"meridian-tiny","prompt":"a","max_tokens":0}`, 400, "max_tokens", ""},
		{"a huge max_tokens", completions, `{"model":"meridian-tiny","prompt":"a","max_tokens":1000000}`, 400, "max_tokens", "1000000"},
		{"a max_tokens that no integer holds", completions, `{"model":"meridian-tiny","prompt":"a","max_tokens":1e99}`, 400, "max_tokens", ""},
		{"a max_tokens that is a text", completions, `{"model":"meridian-tiny","prompt":"a","max_tokens":"5"}`, 400, "max_tokens", ""},
		{"a temperature that is a text", completions, `{"model":"meridian-tiny","prompt":"a","temperature":"hot"}`, 400, "temperature", ""},
		{"a negative temperature", completions, `{"model":"meridian-tiny","prompt":"a","temperature":-1}`, 400, "temperature", ""},
		{"a stream that is a number", completions, `{"model":"meridian-tiny","prompt":"a","stream":1}`, 400, "stream", ""},
		{"an n of 0", completions, `{"model":"meridian-tiny","prompt":"a","n":0}`, 400, "n", ""},
		{"an n over the limit", completions, `{"model":"meridian-tiny","prompt":"a","n":129}`, 400, "n", ""},
		{"a field given twice", completions, `{"model":"meridian-tiny","prompt":"a","prompt":"b"}`, 400, "prompt", "twice"},
		{"text that is not UTF-8", completions, "{\"model\":\"meridian-tiny\",\"prompt\":\"a\xff\"}", 400, "", "UTF-8"},
		{"a body over the limit", completions, `{"model":"meridian-tiny","prompt":"` + strings.Repeat("a", maxBody) + `"}`, 413, "", "limit"},
	}
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, NoClocksync: true, RouterArgs: []string{"--max-body=1048576"}})
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			status, e := r.post(t, c.path, c.body)
			if status != c.status || e.Param != c.param || !strings.Contains(e.Message, c.message) || e.Type == "" || e.RequestID == "" || e.Retryable {
				t.Errorf("status %d, error %+v; want status %d, param %q, message with %q, not retryable, with request_id", status, e, c.status, c.param, c.message)
			}
		})
	}
	if text := r.metrics(t, r.Routers[0]); strings.Contains(text, "meridian_router_decisions_total{") {
		t.Error("a bad request was placed on a node")
	}
	r.ok(t, "after")
}

// refusal is the error object, read by its JSON names.
type refusal struct {
	Message   string `json:"message"`
	Type      string `json:"type"`
	Param     string `json:"param"`
	RequestID string `json:"request_id"`
	Retryable bool   `json:"retryable"`
}

func (r *rig) post(t *testing.T, path, body string) (int, refusal) {
	t.Helper()
	req, err := http.NewRequestWithContext(r.ctx, http.MethodPost, r.URL()+path, bytes.NewReader([]byte(body)))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var outer struct{ Error refusal }
	if err := json.Unmarshal(b, &outer); err != nil {
		t.Errorf("status %d with a body that is no JSON: %.200q", resp.StatusCode, b)
	}
	return resp.StatusCode, outer.Error
}

// metrics is the text of a process's /metrics.
func (r *rig) metrics(t *testing.T, p *cluster.Process) string {
	t.Helper()
	req, err := http.NewRequestWithContext(r.ctx, http.MethodGet, p.URL+"/metrics", nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("metrics of %s: %s, %v", p.Name, resp.Status, err)
	}
	return string(b)
}
