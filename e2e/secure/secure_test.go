package secure

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/clustertest"
)

const (
	model  = "meridian-tiny"
	secret = "the-secret-of-this-test-cluster-0123456789"
	admin  = "key-of-an-administrator"
	client = "key-of-a-client"
)

// start starts a cluster of one node of each kind.
func start(t *testing.T, cfg cluster.Config) *cluster.Cluster {
	t.Helper()
	bin := clustertest.Binaries(t)
	cfg.Bin, cfg.Dir, cfg.Ctx, cfg.Gen, cfg.Schedules, cfg.Logger = bin, t.TempDir(), 1, 1, []string{"generation_first"}, slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c, err := cluster.Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	return c
}

// up starts a cluster whose components know a secret, and whose router knows two keys.
func up(t *testing.T) *cluster.Cluster {
	t.Helper()
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	sum := func(key string) string { s := sha256.Sum256([]byte(key)); return hex.EncodeToString(s[:]) }
	keys := fmt.Sprintf("keys:\n  - {id: root, sha256: %s, admin: true}\n  - {id: team, sha256: %s, models: [%s]}\n", sum(admin), sum(client), model)
	return start(t, cluster.Config{Args: []string{"--cluster-token", write("token", secret+"\n")}, RouterArgs: []string{"--api-keys", write("keys.yaml", keys)}, Key: admin})
}

// ask sends one request and gives the status and the body.
func ask(t *testing.T, method, url, body, key string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	return res.StatusCode, string(b)
}

func TestAClusterWithASecret(t *testing.T) {
	c := up(t)
	router, ctxNode, genNode := c.Routers[0], c.Nodes[0], c.Nodes[1]
	t.Run("a client with a key is served by both nodes", func(t *testing.T) {
		o := openai.NewClient(option.WithBaseURL(router.URL+"/v1/"), option.WithAPIKey(client), option.WithMaxRetries(0))
		res, err := o.Completions.New(t.Context(), openai.CompletionNewParams{
			Model: model, MaxTokens: openai.Int(8), Temperature: openai.Float(0), Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("Once upon a time")},
		})
		if err != nil || res.Choices[0].Text == "" { // generation_first: KV has travelled
			t.Fatalf("%v, %v", res, err)
		}
	})
	t.Run("and may ask what its request cost", func(t *testing.T) { cost(t, router) })
	t.Run("strangers are not", func(t *testing.T) { strangers(t, router, ctxNode, genNode) })
	t.Run("every metric that is documented is there", func(t *testing.T) { metricsAreDocumented(t, c) })
	t.Run("NATS takes nobody without the secret", func(t *testing.T) {
		if nc, err := nats.Connect(c.NATS, nats.Timeout(5*time.Second)); err == nil {
			nc.Close()
			t.Error("a stranger is connected and could register a node")
		}
		nc, err := nats.Connect(c.NATS, nats.Token(secret), nats.Timeout(5*time.Second))
		if err != nil {
			t.Fatal(err)
		}
		nc.Close()
	})
	t.Run("noise of others is counted, and a line a minute", func(t *testing.T) { noise(t, c, router, ctxNode) })
	t.Run("and still when a node has died", func(t *testing.T) { died(t, c) })
	t.Run("no log tells a secret or a key", func(t *testing.T) {
		for _, p := range c.All() {
			b, err := os.ReadFile(p.Log)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range []string{secret, admin, client} {
				if strings.Contains(string(b), s) {
					t.Errorf("the log of %s holds %q", p.Name, s)
				}
			}
		}
	})
}

// noise sends what is no KV connection and no message of a node, again and again.
func noise(t *testing.T, c *cluster.Cluster, router, ctxNode *cluster.Process) {
	const times = 40
	nc, err := nats.Connect(c.NATS, nats.Token(secret), nats.Timeout(5*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	line := ctxNode.Args()
	addr := line[slices.Index(line, "--kv-listen")+1]
	for range times {
		if err := nc.Publish("meridian.load.noise", []byte("{")); err != nil {
			t.Fatal(err)
		}
		conn, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
		_, _ = conn.Write(bytes.Repeat([]byte("noise"), 100))
		_, _ = io.Copy(io.Discard, conn) // until it is refused
		conn.Close()
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	for _, k := range []struct {
		p             *cluster.Process
		key, name, is string
	}{{router, admin, "meridian_router_limited_log_lines_total", "ignoring a message"}, {ctxNode, secret, "meridian_limited_log_lines_total", "kv connection refused"}} {
		want := fmt.Sprintf(`%s{message="%s",written="false"} %d`, k.name, k.is, times-1)
		body, until := "", time.Now().Add(20*time.Second)
		for !strings.Contains(body, want) && time.Now().Before(until) {
			_, body = ask(t, "GET", k.p.URL+"/metrics", "", k.key)
			time.Sleep(10 * time.Millisecond)
		}
		if !strings.Contains(body, want) {
			t.Errorf("%s does not count %s", k.p.Name, want)
		}
		b, err := os.ReadFile(k.p.Log)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(b), k.is); n != 1 {
			t.Errorf("the log of %s says %q %d times, want once", k.p.Name, k.is, n)
		}
	}
}

// died kills the only generation node under a stream: the router has a breaker that saw a failure, however soon it misses the node.
func died(t *testing.T, c *cluster.Cluster) {
	req, err := http.NewRequestWithContext(t.Context(), "POST", c.URL()+"/v1/completions",
		strings.NewReader(`{"model":"`+model+`","prompt":"x","max_tokens":1500,"stream":true,"ignore_eos":true}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+client)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if _, err := res.Body.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if err := c.Nodes[1].Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-c.Nodes[1].Done()
	_, _ = io.Copy(io.Discard, res.Body)
	if status, body := ask(t, "POST", c.URL()+"/v1/completions", `{"model":"`+model+`","prompt":"x","max_tokens":2}`, client); status < 500 {
		t.Errorf("without a generation node: %d %s", status, body)
	}
	metricsAreDocumented(t, c)
}

func TestAClusterOfCertificates(t *testing.T) {
	args, roots := certificates(t)
	c := start(t, cluster.Config{Args: args, TLS: tlsOf(roots)})
	o := openai.NewClient(option.WithBaseURL(c.Routers[0].URL+"/v1/"), option.WithAPIKey("none"), option.WithMaxRetries(0))
	res, err := o.Completions.New(t.Context(), openai.CompletionNewParams{
		Model: model, MaxTokens: openai.Int(8), Temperature: openai.Float(0), Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String("Once upon a time")},
	})
	if err != nil || res.Choices[0].Text == "" { // generation_first: KV has travelled, over TLS
		t.Fatalf("%v, %v", res, err)
	}
	outside := &http.Client{Timeout: 20 * time.Second, Transport: &http.Transport{TLSClientConfig: tlsOf(roots)}}
	defer outside.CloseIdleConnections()
	for _, p := range append(c.Nodes, c.Clock) {
		for path, want := range map[string]int{"/healthz": 200, "/metrics": 403} {
			res, err := outside.Get(p.URL + path)
			if err != nil {
				t.Fatal(err)
			}
			res.Body.Close()
			if res.StatusCode != want {
				t.Errorf("%s%s without a certificate: %d, want %d", p.URL, path, res.StatusCode, want)
			}
		}
	}
	line := c.Nodes[0].Args()
	addr := line[slices.Index(line, "--kv-listen")+1]
	conn, err := tls.Dial("tcp", addr, tlsOf(roots))
	if err != nil {
		return // the handshake failed already
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	var alert *net.OpError
	if _, err := conn.Read(make([]byte, 1)); !errors.As(err, &alert) || alert.Op != "remote error" {
		t.Errorf("the KV listener said %v to somebody without a certificate, want a TLS alert", err)
	}
}

func strangers(t *testing.T, router, ctxNode, genNode *cluster.Process) {
	completion := `{"model":"` + model + `","prompt":"x","max_tokens":2}`
	for _, k := range []struct {
		method, url, body, key string
		want                   int
	}{
		{"POST", router.URL + "/v1/completions", completion, "", 401},
		{"POST", router.URL + "/v1/completions", completion, "wrong", 401},
		{"POST", router.URL + "/v1/completions", completion, secret, 401}, // the components' secret is no client's key
		{"GET", router.URL + "/cluster", "", client, 403},
		{"GET", router.URL + "/timelines", "", client, 403},
		{"GET", router.URL + "/metrics", "", client, 403},
		{"GET", router.URL + "/cluster", "", admin, 200},
		{"POST", router.URL + "/start_profile", "{}", admin, 404},
		{"POST", router.URL + "/steady_clock_offset", `{"offset":5}`, client, 403},
		{"POST", ctxNode.URL + "/v1/completions", completion, client, 401},
		{"POST", genNode.URL + "/v1/completions", completion, admin, 401},
		{"POST", genNode.URL + "/start_profile", "{}", "", 401},
		{"POST", ctxNode.URL + "/steady_clock_offset", `{"offset":5}`, "", 401},
		{"DELETE", ctxNode.URL + "/kv/1", "", "", 401},
		{"GET", genNode.URL + "/server_info", "", "", 401},
		{"GET", genNode.URL + "/metrics", "", "", 401},
		{"GET", genNode.URL + "/iteration_stats", "", "", 401},
		{"GET", genNode.URL + "/healthz", "", "", 200},
		{"GET", genNode.URL + "/server_info", "", secret, 200},
	} {
		if status, body := ask(t, k.method, k.url, k.body, k.key); status != k.want {
			t.Errorf("%s %s with key %q: %d, want %d: %.200s", k.method, k.url, k.key, status, k.want, body)
		}
	}
}

// cost asks for the headers of the merged view: they name both nodes' phases.
func cost(t *testing.T, router *cluster.Process) {
	for _, stream := range []bool{false, true} {
		body := fmt.Sprintf(`{"model":"%s","prompt":"Once upon a time","max_tokens":4,"stream":%v}`, model, stream)
		req, err := http.NewRequestWithContext(t.Context(), "POST", router.URL+"/v1/completions", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+client)
		req.Header.Set("X-TRTLLM-return-metrics", "1")
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		said := fmt.Sprint(res.Header)
		if _, event, ok := strings.Cut(string(b), "data: [DONE]\n\n"); ok == stream && ok {
			said = event
		}
		for _, want := range []string{"disagg_ttft;dur=", "ctx_queue;dur=", "gen_e2e;dur=", "gen_kv_transfer;dur=", "ctx-start;ts=", "gen-step-", "ctx-ctx-chunk-0-forward;dur="} {
			if err != nil || !strings.Contains(said, want) {
				t.Errorf("stream %v: %q is missing in %s (%v)", stream, want, said, err)
			}
		}
	}
}
