package secure

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"meridian.internal/e2e/cluster"
)

// dialogue sends bytes as they are on one connection and gives the statuses of all answers until it is closed, or until want of
// them have come.
func dialogue(t *testing.T, c *cluster.Cluster, text string, want int) (statuses []int) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	go func() { _, _ = io.WriteString(conn, text) }() // the router may close before it has read all
	answers := bufio.NewReader(conn)
	for len(statuses) < want {
		res, err := http.ReadResponse(answers, nil)
		if err != nil {
			return append(statuses, 0) // closed
		}
		_, _ = io.Copy(io.Discard, res.Body)
		res.Body.Close()
		if statuses = append(statuses, res.StatusCode); res.Close {
			return append(statuses, 0)
		}
	}
	return statuses
}

// TestAttacksOnTheClientsPort sends what no client sends to the port of a real router: nothing is answered twice, nothing reaches
// what only administrators or nodes may, nothing is written into logs or metrics, and the router serves on.
func TestAttacksOnTheClientsPort(t *testing.T) {
	c := up(t)
	auth := "Authorization: Bearer " + client + "\r\n"
	body := `{"model":"` + model + `","prompt":"hi","max_tokens":2,"stream":false}`
	post := func(headers, body string) string {
		return "POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + auth + headers + "\r\n\r\n" + body
	}
	sized := func(b string) string { return post(fmt.Sprintf("Content-Length: %d", len(b)), b) }
	hidden := "GET /cluster HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + admin + "\r\n\r\n" // must never be answered
	length := fmt.Sprintf("Content-Length: %d", len(body))
	for _, k := range []struct {
		name string
		text string
		want []int // 0: the connection is closed
	}{
		{"an ordinary request, twice", sized(body) + sized(body), []int{200, 200}},
		{"length and encoding", post(length+"\r\nTransfer-Encoding: chunked", "0\r\n\r\n"+hidden), []int{400, 0}},
		{"encoding and length", post("Transfer-Encoding: chunked\r\n"+length, "0\r\n\r\n"+hidden), []int{400, 0}},
		{"two lengths", post(length+"\r\nContent-Length: 0", hidden), []int{400, 0}},
		{"a list of lengths", post("Content-Length: 5, 5", hidden), []int{400, 0}},
		{"a signed length", post("Content-Length: +5", hidden), []int{400, 0}},
		{"a length in hex", post("Content-Length: 0x5", hidden), []int{400, 0}},
		{"an encoding with a space before the colon", post("Transfer-Encoding : chunked\r\n"+length, "0\r\n\r\n"+hidden), []int{400, 0}},
		{"an encoding behind a bare line feed", post("X: y\nTransfer-Encoding: chunked\r\n"+length, "0\r\n\r\n"+hidden), []int{400, 0}},
		{"an encoding behind a bare carriage return", post("X: y\rTransfer-Encoding: chunked\r\n"+length, "0\r\n\r\n"+hidden), []int{400, 0}},
		{"an encoding with a vertical tab", post("Transfer-Encoding:\vchunked\r\n"+length, "0\r\n\r\n"+hidden), []int{400, 0}},
		{"a folded header", post("X: y\r\n z: a\r\n"+length, hidden), []int{400, 0}},
		{"an unknown encoding", post("Transfer-Encoding: cow", hidden), []int{501, 0}},
		{"two hosts", "POST /v1/completions HTTP/1.1\r\nHost: x\r\nHost: y\r\n" + auth + length + "\r\n\r\n" + hidden, []int{400, 0}},
		{"a NUL in a header", post("X: a\x00b\r\n"+length, hidden), []int{400, 0}},
		{"a head without end", post("X: "+strings.Repeat("a", 1<<20), ""), []int{431, 0}},
		{"a million headers", post(strings.Repeat("a: b\r\n", 200_000)+length, ""), []int{431, 0}},
		{"a chunk that is too long", post("Transfer-Encoding: chunked", "fffffffffffffffff\r\n"), []int{400, 0}},
	} {
		got := dialogue(t, c, k.text, len(k.want))
		// A connection that is reset while much is still being sent loses its answer; it is closed all the same.
		if !slices.Equal(got, k.want) && !(len(k.text) > 100_000 && slices.Equal(got, []int{0})) {
			t.Errorf("%s: answers %v, want %v", k.name, got, k.want)
		}
	}
	for _, path := range []string{"/cluster", "//cluster", "/cluster/", "/%63luster", "/v1/../cluster", "/./cluster", "/timelines", "/timelines/x", "/metrics", "/live", "/"} {
		for _, method := range []string{"GET", "POST", "HEAD"} {
			if code, text := ask(t, method, c.URL()+path, "{}", client); code == 200 || strings.Contains(text, `"nodes"`) {
				t.Errorf("%s %s with the key of a client: %d %.200q", method, path, code, text)
			}
		}
	}
	for _, path := range []string{"/start_profile", "/stop_profile", "/steady_clock_offset", "/iteration_stats", "/server_info", "/kv/1", "/kv_blocks", "/tokenizer", "/debug/pprof/"} {
		for _, method := range []string{"GET", "POST", "PUT", "DELETE"} {
			if code, _ := ask(t, method, c.URL()+path, "{}", admin); code != 404 && code != 405 {
				t.Errorf("%s %s at the router: %d", method, path, code)
			}
		}
	}
	evil := "evil\\n\\\"} 1\\nlevel=ERROR msg=forged"
	for _, b := range []string{
		`{"model":"` + evil + `","prompt":"hi"}`, `{"model":"` + model + `","prompt":"hi","user":"` + evil + `","max_tokens":1}`,
		`{"model":"` + model + `","prompt":"hi","conversation_id":"` + evil + `","max_tokens":1}`, `{"model":"` + model + `","prompt":"` + evil + `","` + evil + `":1,"max_tokens":-1}`,
	} {
		ask(t, "POST", c.URL()+"/v1/completions", b, client)
	}
	if _, metrics := ask(t, "GET", c.URL()+"/metrics", "", admin); strings.Contains(metrics, "evil") || !strings.Contains(metrics, "meridian_router_requests_total") {
		t.Error("a client's text is in the metrics")
	}
	for _, p := range c.All() {
		for line := range strings.Lines(p.LogTail(1000)) {
			if strings.HasPrefix(line, "level=ERROR msg=forged") || strings.Contains(line, client) || strings.Contains(line, admin) {
				t.Errorf("%s logs %q", p.Name, line)
			}
		}
	}
	if code, text := ask(t, "POST", c.URL()+"/v1/completions", body, client); code != 200 {
		t.Errorf("after all that: %d %s", code, text)
	}
}
