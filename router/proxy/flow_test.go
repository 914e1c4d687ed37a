package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"
	"time"

	"meridian.internal/shared/sse"
)

// waits tells in which of some functions, or chains of them, a goroutine waits.
func waits(t *testing.T, in ...string) string {
	t.Helper()
	stacks := make([]byte, 1<<20)
	for end := time.Now().Add(soon); time.Now().Before(end); time.Sleep(time.Millisecond) {
		for g := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			for _, chain := range in {
				all := true
				for name := range strings.SplitSeq(chain, " ") {
					all = all && strings.Contains(g, name+"(")
				}
				if all {
					return chain
				}
			}
		}
	}
	t.Fatalf("nobody waits in %q", in)
	return ""
}

func TestALoopPassesOnWhatHasSocketsOnBothSides(t *testing.T) {
	const loop, own = "proxy.(*flow).wait", "upstream.(*Response).Fill"
	for name, k := range map[string]struct {
		prepare func(*cluster)
		body    string
		want    string
	}{
		"streamed":      {func(*cluster) {}, `{"model":"m","prompt":"x","stream":true}`, loop},
		"not streamed":  {func(*cluster) {}, `{"model":"m","prompt":"x"}`, loop},
		"two choices":   {func(*cluster) {}, `{"model":"m","prompt":"x","n":2,"stream":true}`, own},
		"without loops": {func(c *cluster) { c.proxy.o.Loops = nil }, `{"model":"m","prompt":"x","stream":true}`, own},
		"another server": {func(c *cluster) {
			front := httptest.NewServer(c.echo)
			t.Cleanup(front.Close)
			c.url = front.URL
		}, `{"model":"m","prompt":"x","stream":true}`, own},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, Aggregated, "gen0")
			k.prepare(c)
			release := make(chan struct{})
			c.nodes["gen0"].serve = func(w http.ResponseWriter, r *http.Request, l leg) {
				w.Header().Set("Content-Type", sse.ContentType)
				fmt.Fprintf(w, "data: %s\n\n", `{"choices":[{"index":0,"text":"a","token_ids":[1]}]}`)
				_ = http.NewResponseController(w).Flush()
				hold(r, release)
				for _, piece := range []string{"data: ", `{"choices":[{"index":0,"te`, `xt":"b","token_ids":[2]}]}` + "\n", "\n"} {
					_, _ = io.WriteString(w, piece)
					_ = http.NewResponseController(w).Flush()
				}
				fmt.Fprintf(w, "data: %s\n\ndata: [DONE]\n\n", `{"choices":[{"index":0,"text":"c","token_ids":[3],"finish_reason":"stop"}]}`)
			}
			got := make(chan reply)
			go func() { got <- c.post("/v1/completions", k.body) }()
			if in := waits(t, loop, own); in != k.want {
				t.Errorf("it waits in %s, want %s", in, k.want)
			}
			close(release)
			r := within(t, got, "the request ends")
			for _, text := range []string{"a", "b", "c"} {
				if !strings.Contains(r.body, `"text":"`+text) && !strings.Contains(r.body, `"text":"abc"`) {
					t.Errorf("%q is not in %d: %s", text, r.status, r.body)
				}
			}
			if rec := c.settled()[0]; rec.Tokens.Output%3 != 0 || rec.Tokens.Output == 0 {
				t.Errorf("%d tokens", rec.Tokens.Output)
			}
		})
	}
}

func TestASlowClientGetsAll(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0")
	const tokens = 2000
	long := strings.Repeat("x", 4<<10) // 8 MB: more than sockets hold
	sent := make(chan struct{})
	c.nodes["gen0"].serve = func(w http.ResponseWriter, _ *http.Request, l leg) {
		words := make([]string, tokens)
		for i := range words {
			words[i] = fmt.Sprint(i, long)
		}
		streamTokens(w, l, words...)
		close(sent)
	}
	res, err := c.send(t.Context(), "/v1/completions", `{"model":"m","prompt":"x","stream":true}`)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	waits(t, "poll.(*pollDesc).waitWrite proxy.(*stream).flush") // the client reads nothing: the goroutine of its request waits for it
	select {
	case <-sent:
		t.Error("the node could send all to a client that reads nothing")
	default:
	}
	events := sse.NewReader(res.Body, 0)
	for i := range tokens {
		ev, err := events.Next()
		if err != nil || !strings.Contains(string(ev.Data), fmt.Sprintf(`"text":"%d%s`, i, long)) {
			t.Fatalf("event %d: %.60q, %v", i, ev.Data, err)
		}
	}
	if ev, err := events.Next(); err != nil || !ev.Done() {
		t.Errorf("after the last: %.60q, %v", ev.Data, err)
	}
}

func TestAPanicIsThatOfTheRequestNotOfTheLoop(t *testing.T) {
	f := &flow{back: make(chan struct{}, 1)} // without an attempt
	if f.ready() {
		t.Error("it goes on")
	}
	defer func() {
		if recover() == nil {
			t.Error("the request goes on")
		}
	}()
	_, _ = f.wait(context.Background(), nil)
}
