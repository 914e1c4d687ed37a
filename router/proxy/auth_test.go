package proxy

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"meridian.internal/router/keys"
)

// useKeys gives the router keys: "ID more-members" -> the key of an id is "key-ID".
func (c *cluster) useKeys(entries ...string) (rewrite func(entries ...string)) {
	c.t.Helper()
	path := filepath.Join(c.t.TempDir(), "keys.yaml")
	write := func(entries ...string) {
		text := "keys:\n"
		for _, e := range entries {
			id, more, _ := strings.Cut(e, " ")
			sum := sha256.Sum256([]byte("key-" + id))
			text += fmt.Sprintf("  - {id: %s, sha256: %s%s}\n", id, hex.EncodeToString(sum[:]), more)
		}
		if err := os.WriteFile(path+"~", []byte(text), 0o600); err != nil {
			c.t.Fatal(err)
		}
		if err := os.Rename(path+"~", path); err != nil {
			c.t.Fatal(err)
		}
	}
	write(entries...)
	store, err := keys.Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		c.t.Fatal(err)
	}
	c.proxy.o.Keys = store
	return func(entries ...string) {
		write(entries...)
		store.Reload()
	}
}

func (c *cluster) get(path string, headers ...string) (int, string, http.Header) {
	c.t.Helper()
	req, err := http.NewRequestWithContext(c.t.Context(), "GET", c.url+path, nil)
	if err != nil {
		c.t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		c.t.Fatal(err)
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(res.Body)
	return res.StatusCode, string(b), res.Header
}

func TestKeysDecideWhoMayAsk(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	c.useKeys("a , models: [m]", "other , models: [none]", "root , admin: true")
	basic := func(secret string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte("me:"+secret)) }
	for _, k := range []struct {
		name, auth string
		status     int
	}{
		{"no key", "", 401},
		{"a wrong key", "Bearer key-b", 401},
		{"a part of a key", "Bearer key-", 401},
		{"a huge key", "Bearer " + strings.Repeat("k", 30_000), 401},
		{"another scheme", "Digest key-a", 401},
		{"Basic is for the pages of administrators", basic("key-root"), 401},
		{"the scheme in another case", "bearer key-a", 200},
		{"a key", "Bearer key-a", 200},
		{"a model that the key may not use is unknown", "Bearer key-other", 404},
	} {
		t.Run(k.name, func(t *testing.T) {
			got := c.post("/v1/completions", completion, "Authorization", k.auth)
			if got.status != k.status {
				t.Fatalf("status %d, want %d: %s", got.status, k.status, got.body)
			}
			if k.status == 401 && (got.header.Get("WWW-Authenticate") == "" || !strings.Contains(got.body, "authentication_error")) {
				t.Errorf("401 with %v %s", got.header, got.body)
			}
			if strings.Contains(got.body, "key-") {
				t.Errorf("the answer repeats the key: %s", got.body)
			}
		})
	}
	if status, body, _ := c.get("/v1/models", "Authorization", "Bearer key-other"); status != 200 || strings.Contains(body, `"m"`) {
		t.Errorf("models of a key without models: %d %s", status, body)
	}
	for path, want := range map[string]int{"/v1/models/m": 200, "/v1/models/%6d": 200, "/v1/models/none": 404, "/v1/models/": 404, "/v1/models/m/m": 404} {
		if status, body, _ := c.get(path, "Authorization", "Bearer key-a"); status != want || want == 200 && !strings.Contains(body, `"id":"m"`) {
			t.Errorf("GET %s: %d %s, want %d", path, status, body, want)
		}
	}
	if status, body, _ := c.get("/v1/models/m", "Authorization", "Bearer key-other"); status != 404 || strings.Contains(body, `"id"`) {
		t.Errorf("a model that the key may not use: %d %s", status, body)
	}
	if status, _, _ := c.get("/v1/models", "Authorization", "Bearer key-a", "Authorization", "Bearer key-root"); status != 401 {
		t.Errorf("two keys in one request: %d, want 401", status)
	}
}

func TestAdministratorsFaces(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	if status, _, _ := c.get("/cluster"); status != 200 {
		t.Errorf("without keys configured everything is open; got %d", status)
	}
	c.useKeys("a", "root , admin: true")
	basic := "Basic " + base64.StdEncoding.EncodeToString([]byte("me:key-root"))
	for _, k := range []struct {
		path, auth string
		status     int
	}{
		{"/cluster", "", 401}, {"/cluster", "Bearer key-a", 403}, {"/cluster", "Bearer key-root", 200}, {"/cluster", basic, 200},
		{"/metrics", "Bearer key-a", 403}, {"/nothing", "", 401}, {"/nothing", "Bearer key-root", 404}, {"/v1/../cluster", "", 404}, // no such route: paths are matched as they come
		{"/start_profile", "Bearer key-root", 404}, {"/steady_clock_offset", "Bearer key-root", 404}, // these are of nodes
		{"/healthz", "", 200}, {"//cluster", "", 401}, {"/healthz/../cluster", "", 401},
	} {
		if status, body, _ := c.get(k.path, "Authorization", k.auth); status != k.status {
			t.Errorf("GET %s with %q: %d, want %d: %s", k.path, k.auth, status, k.status, body)
		}
	}
	got := c.post("/cluster", "{}", "Authorization", basic)
	if got.status != 401 {
		t.Errorf("a change by a browser's credentials: %d, want 401", got.status)
	}
}

func TestLimitsOfAKey(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	c.useKeys("a , requests_per_minute: 2", "b , tokens_per_minute: 5", "c , max_priority: 1", "d , max_priority: 0")
	began := time.Now()
	for i, want := range []int{200, 200, 429} {
		got := c.post("/v1/completions", completion, "Authorization", "Bearer key-a")
		if got.status != want {
			t.Errorf("request %d: %d, want %d", i, got.status, want)
			continue
		}
		// Half a minute fills the place of one: what has passed since the first is no more to be waited for.
		after, err := strconv.Atoi(got.header.Get("Retry-After"))
		if want == 429 && (err != nil || after > 30 || after < 30-int(time.Since(began).Seconds()) || !strings.Contains(got.body, "rate_limit_error")) {
			t.Errorf("429 with %v %s", got.header, got.body)
		}
	}
	for i, want := range []int{200, 429} { // the first one costs five tokens
		if got := c.post("/v1/completions", completion, "Authorization", "Bearer key-b"); got.status != want {
			t.Errorf("request %d of b: %d, want %d", i, got.status, want)
		}
	}
	for len(c.legs) > 0 {
		<-c.legs
	}
	c.post("/v1/completions", `{"model":"m","prompt":"hi","priority":7,"prompt_cache_retention":"24h"}`, "Authorization", "Bearer key-c")
	for _, l := range c.taken(2) {
		if string(l.body["priority"]) != "1" || string(l.body["prompt_cache_retention"]) != `"24h"` || l.header.Get("Authorization") != "" {
			t.Errorf("%s got priority %s, retention %s and Authorization %q", l.node, l.body["priority"], l.body["prompt_cache_retention"], l.header.Get("Authorization"))
		}
	}
	c.post("/v1/completions", `{"model":"m","prompt":"hi","prompt_cache_retention":"24h"}`, "Authorization", "Bearer key-d")
	for _, l := range c.taken(2) {
		if string(l.body["prompt_cache_retention"]) != `"in_memory"` || l.body["priority"] != nil {
			t.Errorf("%s got retention %s and priority %s", l.node, l.body["prompt_cache_retention"], l.body["priority"])
		}
	}
}

func TestARequestThatReachesNoNodeCostsItsKeyNoTokens(t *testing.T) {
	c := newCluster(t, Auto)
	c.useKeys("a , tokens_per_minute: 2")
	for i := range 3 {
		if got := c.post("/v1/completions", `{"model":"m","prompt":[1,2,3]}`, "Authorization", "Bearer key-a"); got.status != 503 {
			t.Errorf("request %d: %d, want 503: no node is there", i, got.status)
		}
	}
}

func TestKeysAreReloadedWhileARequestRuns(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	rewrite := c.useKeys("a , max_running: 1")
	running, finish := make(chan struct{}), make(chan struct{})
	c.nodes["gen0"].serve = func(w http.ResponseWriter, r *http.Request, l leg) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		close(running)
		hold(r, finish)
		streamTokens(w, l, "a", "b")
	}
	done := make(chan reply)
	go func() { done <- c.post("/v1/completions", completion, "Authorization", "Bearer key-a") }()
	within(t, running, "the leg runs")
	if got := c.post("/v1/completions", completion, "Authorization", "Bearer key-a"); got.status != 429 {
		t.Errorf("a second one at the same time: %d, want 429", got.status)
	}
	rewrite("b")
	if got := c.post("/v1/completions", completion, "Authorization", "Bearer key-a"); got.status != 401 {
		t.Errorf("a key that was taken away: %d, want 401", got.status)
	}
	close(finish)
	if got := within(t, done, "the running request ends"); got.status != 200 || text(t, got.events, false) != "ab" {
		t.Errorf("the running request: %d %s", got.status, got.body)
	}
}

func TestAStrangersBodyIsNotRead(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	c.useKeys("a")
	body := &counting{left: 1 << 20}
	req, err := http.NewRequestWithContext(t.Context(), "POST", c.url+"/v1/completions", body)
	if err != nil {
		t.Fatal(err)
	}
	req.ContentLength = 1 << 20
	req.Header.Set("Expect", "100-continue") // so that an honest client sends nothing before it is asked to
	tr := &http.Transport{ExpectContinueTimeout: 1 << 40}
	defer tr.CloseIdleConnections()
	res, err := tr.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	res.Body.Close()
	if res.StatusCode != 401 || body.read != 0 {
		t.Errorf("status %d after %d bytes", res.StatusCode, body.read)
	}
}

type counting struct{ left, read int }

func (c *counting) Read(p []byte) (int, error) {
	n := min(len(p), c.left-c.read)
	c.read += n
	if n == 0 {
		return 0, io.EOF
	}
	return n, nil
}
