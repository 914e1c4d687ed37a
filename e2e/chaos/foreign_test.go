package chaos

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

// foreign is a context and a generation worker that knows no NATS and no clock, as TensorRT-LLM's.
type foreign struct {
	*httptest.Server
	mu   sync.Mutex
	legs []foreignLeg // guarded by mu
}

type foreignLeg struct {
	Kind   string
	Prompt json.RawMessage
	Disagg map[string]json.RawMessage
}

const foreignPrompt = `[[7, 8, 9]]` // nested: it must come back as it was

func newForeign(t *testing.T) *foreign {
	f := &foreign{}
	f.Server = httptest.NewServer(http.HandlerFunc(f.serve))
	t.Cleanup(f.Close)
	return f
}

func (f *foreign) serve(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/health":
	case "/v1/models":
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
	case "/v1/completions":
		f.leg(w, r)
	default:
		http.NotFound(w, r)
	}
}

func (f *foreign) leg(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	var req struct {
		Prompt json.RawMessage            `json:"prompt"`
		Disagg map[string]json.RawMessage `json:"disaggregated_params"`
	}
	if err := json.Unmarshal(body, &req); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var kind string
	_ = json.Unmarshal(req.Disagg["request_type"], &kind)
	f.mu.Lock()
	f.legs = append(f.legs, foreignLeg{kind, req.Prompt, req.Disagg})
	f.mu.Unlock()
	const usage = `"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}`
	if kind == "context_only" {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"id":"c","object":"text_completion","created":1,"model":"m","prompt_token_ids":%s,"choices":[{"index":0,"text":"A","finish_reason":"length",`+
			`"disaggregated_params":{"request_type":"context_only","first_gen_tokens":[5],"ctx_request_id":11,"encoded_opaque_state":"c3RhdGU=","a_field_of_theirs":{"x":[1]},"disagg_request_id":%s}}],%s}`,
			foreignPrompt, req.Disagg["disagg_request_id"], usage)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprint(w, `data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"AB","finish_reason":null}]}`+"\n\n")
	fmt.Fprintf(w, `data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"","finish_reason":"length"}],%s}`+"\n\ndata: [DONE]\n\n", usage)
}

func (f *foreign) seen() []foreignLeg {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]foreignLeg(nil), f.legs...)
}

// TestForeignWorkersAreProbedOnlyWhereThatIsWanted starts the router in front of workers that are not ours, with each --qualify.
func TestForeignWorkersAreProbedOnlyWhereThatIsWanted(t *testing.T) {
	for _, k := range []struct {
		qualify string
		probes  int // legs of each worker before the first client
	}{{"all", 1}, {"own", 0}, {"none", 0}} {
		t.Run(k.qualify, func(t *testing.T) {
			ctxWorker, genWorker := newForeign(t), newForeign(t)
			r := start(t, cluster.Config{NoClocksync: true, RouterArgs: []string{"--ctx", ctxWorker.URL, "--gen", genWorker.URL, "--qualify", k.qualify}})
			before := [2]int{len(ctxWorker.seen()), len(genWorker.seen())}
			if before != [2]int{k.probes, k.probes} {
				t.Errorf("legs before any client: %v, want %d each", before, k.probes)
			}
			res, err := r.client.Do(r.ctx, client.Request{ID: "foreign-" + k.qualify, Fields: map[string]any{
				"model": "m", "prompt": "hello", "max_tokens": 4, "stream": true,
			}})
			if err != nil || res.Text != "AB" {
				t.Fatalf("%v, text %q, want AB", err, res.Text)
			}
			gen := genWorker.seen()
			last := gen[len(gen)-1]
			if last.Kind != "generation_only" || string(last.Disagg["encoded_opaque_state"]) != `"c3RhdGU="` || string(last.Disagg["a_field_of_theirs"]) != `{"x":[1]}` {
				t.Errorf("the generation leg got %s %v: want what the context worker said, unchanged", last.Kind, last.Disagg)
			}
			if string(last.Prompt) != foreignPrompt {
				t.Errorf("the generation leg's prompt is %s, want %s as the context worker gave it", last.Prompt, foreignPrompt)
			}
		})
	}
}
