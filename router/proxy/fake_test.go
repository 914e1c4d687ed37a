package proxy

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"meridian.internal/router/place"
	"meridian.internal/router/pool"
	"meridian.internal/router/upstream"
	"meridian.internal/shared/api"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/poll"
	"meridian.internal/shared/serve"
)

// leg is a request that a fake node got.
type leg struct {
	node   string
	path   string
	header http.Header
	body   map[string]json.RawMessage
	raw    string
	disagg api.DisaggParams
}

// fakeNode answers legs as a node of ours does: a stream of three tokens, or the context answer.
type fakeNode struct {
	t     *testing.T
	name  string
	role  node.Role
	srv   *httptest.Server
	legs  chan leg                                            // every leg as it comes
	gone  chan string                                         // a leg whose client closed the connection: "name"
	serve func(w http.ResponseWriter, r *http.Request, l leg) // nil: the normal answer
	freed chan string                                         // id of a DELETE /kv/{id}
	moved chan api.DisaggParams                               // of a PUT /kv/{id}; nil: there is none
}

func (f *fakeNode) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	raw, _ := io.ReadAll(r.Body)
	l := leg{node: f.name, path: r.URL.Path, header: r.Header, raw: string(raw)}
	if err := json.Unmarshal(raw, &l.body); err != nil {
		f.t.Errorf("%s got a body that is no JSON: %q", f.name, raw)
	}
	if d := l.body["disaggregated_params"]; d != nil {
		if err := json.Unmarshal(d, &l.disagg); err != nil {
			f.t.Errorf("%s got disaggregated_params %s: %v", f.name, d, err)
		}
	}
	f.legs <- l
	if f.serve != nil {
		f.serve(w, r, l)
		return
	}
	if l.disagg.RequestType == api.ContextOnly {
		answerCtx(w, l)
		return
	}
	streamTokens(w, l, "a", "b", "c")
}

func answerCtx(w http.ResponseWriter, l leg) {
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(w, `{"id":"x","prompt_token_ids":[[7,8]],"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3,"prompt_tokens_details":{"cached_tokens":1}},
		"choices":[{"index":0,"text":"a","finish_reason":"length","disaggregated_params":{"request_type":"context_only","first_gen_tokens":[5],
		"ctx_request_id":%d,"disagg_request_id":%d,"encoded_opaque_state":"b3Bh","future":1.50}}]}`, *l.disagg.DisaggRequestID, *l.disagg.DisaggRequestID)
}

// streamTokens sends one chunk a token, then usage and the end mark.
func streamTokens(w http.ResponseWriter, l leg, words ...string) {
	w.Header().Set("Content-Type", "text/event-stream")
	w.(http.Flusher).Flush()
	h := api.Head{ID: "node", Model: "internal", Created: 1, Chat: strings.Contains(l.path, "chat")}
	for i, word := range words {
		c := api.Choice{Text: word, TokenIDs: []int32{int32(i + 5)}, Role: i == 0}
		if i == len(words)-1 {
			c.Finish = "stop"
		}
		fmt.Fprintf(w, "data: %s\n\n", h.AppendChunk(nil, c))
		w.(http.Flusher).Flush()
	}
	fmt.Fprintf(w, "data: %s\n\ndata: [DONE]\n\n", h.AppendUsageChunk(nil, api.Usage{PromptTokens: 2, CompletionTokens: len(words), TotalTokens: 2 + len(words)}))
}

// aToken is the event of one.
const aToken = `{"choices":[{"index":0,"text":"a","token_ids":[5],"finish_reason":null}]}`

// streamEvents sends events that are given whole.
func streamEvents(w http.ResponseWriter, events ...string) {
	w.Header().Set("Content-Type", "text/event-stream")
	for _, e := range events {
		fmt.Fprintf(w, "data: %s\n\n", e)
		w.(http.Flusher).Flush()
	}
}

// waitGone blocks until the client of the leg has closed its connection.
func (f *fakeNode) waitGone(r *http.Request) {
	<-r.Context().Done()
	f.gone <- f.name
}

// soon is how long a test waits for what comes at once where nothing is broken.
const soon = time.Minute

// within waits for a value of ch, which what describes.
func within[T any](t *testing.T, ch <-chan T, what string) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(soon):
		t.Fatalf("%s: not after %s", what, soon)
	}
	return v
}

// hold keeps a leg until ch is closed, or its client has left.
func hold(r *http.Request, ch <-chan struct{}) {
	select {
	case <-ch:
	case <-r.Context().Done():
	}
}

// cancelled gives the name of the node of a leg that was cancelled.
func (c *cluster) cancelled() string {
	c.t.Helper()
	return within(c.t, c.gone, "a leg is cancelled")
}

// leg is the next leg that came to a node.
func (c *cluster) leg() leg {
	c.t.Helper()
	return within(c.t, c.legs, "a leg comes")
}

// cluster is a router with fake nodes.
type cluster struct {
	t     *testing.T
	pool  *pool.Pool
	nodes map[string]*fakeNode
	legs  chan leg
	gone  chan string
	url   string
	echo  http.Handler // what is served at url
	proxy *Proxy
	end   context.CancelFunc // stops the router

	mu      sync.Mutex // guards records
	records []*phase.Record
}

func (c *cluster) record(r *phase.Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.records = append(c.records, r)
}

// newCluster makes a router over nodes named like "ctx0" and "gen1".
func newCluster(t *testing.T, schedule string, names ...string) *cluster {
	t.Helper()
	steady, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{t: t, nodes: map[string]*fakeNode{}, legs: make(chan leg, 1000), gone: make(chan string, 100)}
	c.pool, err = pool.New(pool.Options{Now: steady.Now, CtxPolicy: place.RoundRobin, GenPolicy: place.RoundRobin})
	if err != nil {
		t.Fatal(err)
	}
	client, loops := upstream.New(upstream.Options{}), poll.NewLoops(1)
	t.Cleanup(func() { client.Close(); _ = loops.Close() })
	c.proxy, err = New(Options{
		Name: "r0", Pool: c.pool, Client: client, Loops: loops, Steady: steady, Schedule: schedule, Record: c.record, MaxBody: 1 << 20,
		Tokenizers: &Tokenizers{Pool: c.pool, Client: client, Build: func(f TokenizerFile) (*Tokenizer, error) {
			return &Tokenizer{ContextLen: 100, Vocab: 1000, Encode: func(s string) []int32 { return []int32{7, int32(len(s))} }}, nil
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		c.add(name)
	}
	s, err := serve.New(serve.Options{Listen: "127.0.0.1:0", Allow: c.proxy.Allow, Grace: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	c.proxy.Routes(s.Echo())
	var ctx context.Context
	ctx, c.end = context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx) }()
	t.Cleanup(func() { c.end(); within(t, served, "the router ends its requests") })
	c.url, c.echo = "http://"+s.Addr(), s.Echo()
	return c
}

func (c *cluster) add(name string) *fakeNode {
	f := &fakeNode{t: c.t, name: name, role: node.Role(name[:3]), legs: c.legs, gone: c.gone}
	mux := http.NewServeMux()
	mux.Handle("POST /", f)
	f.freed = make(chan string, 100)
	mux.HandleFunc("DELETE /kv/{id}", func(w http.ResponseWriter, r *http.Request) {
		f.freed <- r.PathValue("id")
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("PUT /kv/{id}", func(w http.ResponseWriter, r *http.Request) {
		var p api.DisaggParams
		if err := json.NewDecoder(r.Body).Decode(&p); err != nil || f.moved == nil {
			w.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		f.moved <- p
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET /tokenizer", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"hash":"h"}`) })
	f.srv = httptest.NewServer(mux)
	c.t.Cleanup(func() {
		f.srv.CloseClientConnections()
		closed := make(chan struct{})
		go func() { f.srv.Close(); close(closed) }()
		within(c.t, closed, "the legs of "+name+" end")
	})
	c.nodes[name] = f
	info := node.Info{
		Name: name, Role: f.role, URL: f.srv.URL, State: node.Ready, Seq: 1,
		Model: &node.Model{Name: "m", Hash: "h", ContextLen: 100},
	}
	if f.role == node.RoleCtx {
		info.KVAddr = "10.0.0.1:700"
	}
	c.pool.Put(info)
	return f
}

// reply is what a client got.
type reply struct {
	status int
	header http.Header
	body   string
	events []string // data of the events of a stream
}

// send sends a request, whose answer is to be read before long.
func (c *cluster) send(ctx context.Context, path, body string, headers ...string) (*http.Response, error) {
	ctx, cancel := context.WithTimeout(ctx, soon)
	c.t.Cleanup(cancel)
	req, err := http.NewRequestWithContext(ctx, "POST", c.url+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	for i := 0; i+1 < len(headers) && headers[i] != ""; i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	return http.DefaultClient.Do(req)
}

func (c *cluster) post(path, body string, headers ...string) reply {
	c.t.Helper()
	res, err := c.send(c.t.Context(), path, body, headers...)
	if err != nil {
		c.t.Errorf("no answer of %s: %v", path, err)
		return reply{}
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		c.t.Errorf("body of %s: %v", path, err)
	}
	out := reply{status: res.StatusCode, header: res.Header, body: string(raw)}
	sc := bufio.NewScanner(strings.NewReader(out.body))
	for sc.Scan() {
		if data, ok := strings.CutPrefix(sc.Text(), "data: "); ok {
			out.events = append(out.events, data)
		}
	}
	return out
}

func (c *cluster) taken(n int) map[string]leg {
	out := map[string]leg{}
	for range n {
		l := c.leg()
		out[l.node] = l
	}
	return out
}

// idle waits until no request is served: a client may have its last byte before its request has given back what it held.
func (c *cluster) idle() {
	c.t.Helper()
	for end := time.Now().Add(soon); ; time.Sleep(time.Millisecond) {
		var m dto.Metric
		if err := c.proxy.met.inflight.Write(&m); err != nil {
			c.t.Fatal(err)
		}
		if m.GetGauge().GetValue() == 0 {
			return
		}
		if time.Now().After(end) {
			c.t.Fatalf("%v requests are still served", m.GetGauge().GetValue())
		}
	}
}

// settled checks that nothing is reserved once no request is served, and returns the records.
func (c *cluster) settled() []*phase.Record {
	c.t.Helper()
	c.idle()
	for _, s := range c.pool.Snapshot() {
		if s.Reserved != 0 {
			c.t.Errorf("%s has %d reservations left", s.Info.Name, s.Reserved)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.records
}

func text(t *testing.T, events []string, chat bool) string {
	t.Helper()
	var out strings.Builder
	for _, e := range events {
		if e == "[DONE]" {
			continue
		}
		var chunk struct {
			Choices []struct {
				Text  string
				Delta struct{ Content string }
			}
		}
		if err := json.Unmarshal([]byte(e), &chunk); err != nil {
			t.Errorf("event %q: %v", e, err)
		}
		for _, c := range chunk.Choices {
			if chat {
				out.WriteString(c.Delta.Content)
			} else {
				out.WriteString(c.Text)
			}
		}
	}
	return out.String()
}
