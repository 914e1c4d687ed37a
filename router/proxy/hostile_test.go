package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// raw sends bytes as they are, and where it ends says that no more will come. It gives the status of the first answer; 0: the
// connection was closed without one.
func (c *cluster) raw(text string, ends bool) int {
	c.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(c.url, "http://"))
	if err != nil {
		c.t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(60 * time.Second))
	if _, err := io.WriteString(conn, text); err != nil {
		return 0
	}
	if ends {
		_ = conn.(*net.TCPConn).CloseWrite()
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0
	}
	res.Body.Close()
	return res.StatusCode
}

func TestHostileRequests(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	body := `{"model":"m","prompt":"hi"}`
	head := func(more string) string { return "POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + more + "\r\n\r\n" }
	sized := func(b string) string { return head(fmt.Sprintf("Content-Length: %d", len(b))) + b }
	for name, k := range map[string]struct {
		text string
		want []int // statuses
	}{
		"two lengths":            {head("Content-Length: 27\r\nContent-Length: 5") + body, []int{400}},
		"a signed length":        {head("Content-Length: +27") + body, []int{400}},
		"an unknown encoding":    {head("Transfer-Encoding: xchunked\r\nContent-Length: 27") + body, []int{400, 501}},
		"two encodings":          {head("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity") + "0\r\n\r\n", []int{400, 501}},
		"a space before a colon": {head("Content-Length : 27") + body, []int{400}},
		"a body that is short":   {head("Content-Length: 500") + body, []int{400}}, // its end comes: TestABodyThatNeverComesIsCut waits for one that does not
		"a promise too large":    {head("Content-Length: 99999999999") + body, []int{413}},
		"a negative length":      {head("Content-Length: -1") + body, []int{400}},
		"a compressed body":      {head("Content-Encoding: gzip\r\nContent-Length: 27") + body, []int{415}},
		"a broken chunk":         {head("Transfer-Encoding: chunked") + "zz\r\n", []int{400}},
		"a key twice":            {sized(`{"model":"m","prompt":"hi","model":"m"}`), []int{400}},
		"a key twice, escaped":   {sized(`{"model":"m","prompt":"hi","m\u006fdel":"m"}`), []int{400}},
		"deep JSON":              {sized(`{"model":"m","prompt":` + strings.Repeat("[", 200_000) + `}`), []int{400}},
		"deep JSON, closed":      {sized(`{"model":"m","prompt":"x","y":` + strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000) + `}`), []int{400}},
		"invalid UTF-8":          {sized("{\"model\":\"m\",\"prompt\":\"\xff\xfe\"}"), []int{400}},
		"no JSON":                {sized("prompt=hi"), []int{400}},
		"a NUL":                  {sized("{\"model\":\"m\",\"prompt\":\"a\x00b\"}"), []int{400}},
		"an id with a quote":     {head("X-Request-Id: a\"b\r\nContent-Length: 27") + body, []int{400}},
		"an id with a line end":  {head("X-Request-Id: a\nb: c\r\nContent-Length: 27") + body, []int{400, 200}}, // 200: a header b, not an id
		"an id of markup":        {head("X-Request-Id: <script>\r\nContent-Length: 27") + body, []int{400}},
		"a long id":              {head("X-Request-Id: "+strings.Repeat("a", 500)+"\r\nContent-Length: 27") + body, []int{400}},
	} {
		got := c.raw(k.text, name == "a body that is short")
		ok := false
		for _, w := range k.want {
			ok = ok || got == w
		}
		if !ok {
			t.Errorf("%s: status %d, want one of %v", name, got, k.want)
		}
		for len(c.legs) > 0 {
			if l := <-c.legs; k.want[len(k.want)-1] != 200 {
				t.Errorf("%s: %s got a leg: %s", name, l.node, l.raw)
			}
		}
	}
}

func TestControlHeadersOfClientsReachNoNode(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	c.post("/v1/completions", `{"model":"m","prompt":"hi","output_token_ids":[1],"disaggregated_params":{"request_type":"generation_only","ctx_info_endpoint":"tcp://evil:1"}}`,
		"X-Meridian-Probe", "1", "X-Meridian-Router", "evil", "X-Meridian-Request", "evil", "X-Meridian-Deadline-Ms", "999999999", "Authorization", "Bearer x", "Cookie", "a=b", "X-Forwarded-For", "evil", "X-Other", "evil")
	for _, l := range c.taken(2) {
		if l.header.Get("X-Meridian-Probe") != "" || l.header.Get("X-Meridian-Router") != "r0" || l.header.Get("X-Meridian-Deadline-Ms") == "999999999" ||
			strings.Contains(fmt.Sprint(l.header), "evil") || l.header.Get("Authorization") != "" || l.header.Get("Cookie") != "" {
			t.Errorf("%s got %v", l.node, l.header)
		}
		if l.body["output_token_ids"] != nil || strings.Contains(l.raw, "evil") {
			t.Errorf("%s got %s", l.node, l.raw)
		}
	}
}
