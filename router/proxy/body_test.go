package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/shared/api"
	"meridian.internal/shared/serve"
	"meridian.internal/shared/serve/servetest"
)

// reading is a session that has a body to read, and nothing else.
func reading(maxBody int, all *bodies) *session {
	return &session{p: &Proxy{o: Options{MaxBody: maxBody}, bodies: all}, rc: *http.NewResponseController(httptest.NewRecorder())}
}

func bodyOf(t *testing.T, text string, length int64) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", "/", io.NopCloser(strings.NewReader(text)))
	if err != nil {
		t.Fatal(err)
	}
	req.ContentLength = length
	return req
}

func TestABodyGetsNoMemoryForItsLengthAlone(t *testing.T) {
	s := reading(1<<30, &bodies{limit: 1 << 40})
	body, e := s.readBody(bodyOf(t, "x", 1<<30))
	if e != nil || len(body) != 1 || cap(body) > maxPromise {
		t.Errorf("%d bytes in %d, %v", len(body), cap(body), e)
	}
}

func TestBodiesOfEverySizeAreReadWhole(t *testing.T) {
	for _, n := range []int{0, 1, minBody - 1, minBody, minBody + 1, maxPromise - 1, maxPromise, maxPromise + 1, 999_999, 1_000_000, 1_000_001} {
		for _, length := range []int64{-1, int64(n)} {
			all := &bodies{limit: 1 << 40}
			s := reading(1_000_000, all)
			text := strings.Repeat("abcdefg", n/7+1)[:n]
			body, e := s.readBody(bodyOf(t, text, length))
			switch {
			case n > 1_000_000 && length > 0:
				if e == nil || e.Status() != http.StatusRequestEntityTooLarge {
					t.Errorf("%d bytes of 1,000,000: %v", n, e)
				}
			case e != nil || string(body) != text: // one byte too many is kept, so that the parser sees that there is one
				t.Errorf("%d bytes with length %d: %d came, %v", n, length, len(body), e)
			case all.used.Load() != int64(cap(body)):
				t.Errorf("%d bytes: %d counted for %d", n, all.used.Load(), cap(body))
			}
			s.giveBody()
			s.reuseBody() // the next one gets its memory, where that fits
			if left := all.used.Load(); left != 0 {
				t.Errorf("%d bytes: %d are still counted", n, left)
			}
		}
	}
}

// Bodies that together find no room are refused, with a time to come again; those that run go on, and leave the room to others.
func TestTheBodiesOfAllRequestsHaveABound(t *testing.T) {
	c := newCluster(t, Aggregated, "gen0")
	c.proxy.bodies.limit = 200 << 10
	running, end := make(chan struct{}), make(chan struct{})
	c.nodes["gen0"].serve = func(w http.ResponseWriter, r *http.Request, l leg) {
		close(running)
		hold(r, end)
		streamTokens(w, l, "a")
	}
	large := `{"model":"m","prompt":"hi","user":"u"` + strings.Repeat(" ", 120<<10) + `}`
	done := make(chan reply, 1)
	go func() { done <- c.post("/v1/completions", large) }()
	within(t, running, "the leg runs")
	refused := c.post("/v1/completions", large)
	if refused.status != http.StatusServiceUnavailable || refused.header.Get("Retry-After") == "" || !strings.Contains(refused.body, "memory") {
		t.Errorf("got %d %v %q", refused.status, refused.header, refused.body)
	}
	c.nodes["gen0"].serve = nil
	if small := c.post("/v1/completions", completion); small.status != 200 {
		t.Errorf("a small one beside it got %d %s", small.status, small.body)
	}
	close(end)
	if got := within(t, done, "the one that ran ends"); got.status != 200 {
		t.Errorf("the one that ran got %d %s", got.status, got.body)
	}
	c.idle()
	if got := c.post("/v1/completions", large); got.status != 200 {
		t.Errorf("after it: %d %s", got.status, got.body)
	}
	c.idle()
	if n := c.proxy.bodies.used.Load(); n != 0 {
		t.Errorf("%d bytes are counted at idle", n)
	}
}

func TestABodyThatNeverComesIsCut(t *testing.T) {
	c := newCluster(t, Auto, "ctx0", "gen0")
	s, err := serve.New(serve.Options{Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	c.proxy.Routes(s.Echo())
	for name, drip := range map[string]time.Duration{"silent": time.Hour, "a byte a second": time.Second} {
		synctest.Test(t, func(t *testing.T) {
			ln := &servetest.Pipes{Conns: make(chan net.Conn)}
			srv := &http.Server{Handler: s.Echo()}
			go func() { _ = srv.Serve(ln) }() // ends by Close
			defer srv.Close()
			client, server := net.Pipe()
			var writer sync.WaitGroup
			defer writer.Wait()
			defer client.Close()
			ln.Conns <- server
			began := time.Now()
			writer.Go(func() {
				_, err := io.WriteString(client, "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 500\r\n\r\n{")
				for err == nil {
					time.Sleep(drip)
					_, err = io.WriteString(client, " ")
				}
			})
			res, err := http.ReadResponse(bufio.NewReader(client), nil)
			if err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); res.StatusCode != http.StatusRequestTimeout || took < bodyTime-time.Second || took > bodyTime+time.Second {
				t.Errorf("%s: status %d after %s, want 408 after %s", name, res.StatusCode, took, bodyTime)
			}
			_, _ = io.Copy(io.Discard, res.Body)
			if _, err := client.Read(make([]byte, 1)); err == nil {
				t.Errorf("%s: the connection is still open", name)
			}
		})
	}
	if len(c.legs) > 0 {
		t.Error("a node got a leg")
	}
}

// The memory of a body goes from request to request; what each says stays its own, also while others run and end.
func TestABodyIsItsRequestsOwn(t *testing.T) {
	c := newCluster(t, ContextFirst, "ctx0", "gen0")
	for _, n := range c.nodes {
		serve := n.serve
		n.serve = func(w http.ResponseWriter, r *http.Request, l leg) {
			<-c.legs
			if id := `"` + l.header.Get(api.HeaderRequestID) + `"`; string(l.body["user"]) != id {
				t.Errorf("%s of request %s got the user %s", l.path, id, l.body["user"])
			}
			switch {
			case serve != nil:
				serve(w, r, l)
			case l.node == "ctx0":
				answerCtx(w, l)
			default:
				streamTokens(w, l, "a")
			}
		}
	}
	var all sync.WaitGroup
	for i := range 8 {
		all.Go(func() {
			for j := range 20 {
				id := fmt.Sprintf("r%d-%d", i, j)
				body := fmt.Sprintf(`{"model":"m","prompt":"hi","stream":true,"x":%q,"user":%q}`, strings.Repeat("x", 2111*j), id) // some are written in pieces
				if got := c.post("/v1/completions", body, api.HeaderRequestID, id); got.status != 200 {
					t.Errorf("got %d %s", got.status, got.body)
				}
			}
		})
	}
	all.Wait()
	c.idle()
}
