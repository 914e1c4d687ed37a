package serve

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/serve/servetest"
)

func TestABodyThatStaysAwayIsNotWaitedFor(t *testing.T) {
	whole := make(chan error, 1)
	s := start(t, Options{BodyTime: 50 * time.Millisecond}, func(e *echo.Echo) {
		e.POST("/take", func(c echo.Context) error {
			_, err := io.ReadAll(c.Request().Body)
			if err == nil && c.Request().Header.Get("X-Long") != "" { // what is served outlives the time of its body
				select {
				case <-c.Request().Context().Done():
				case <-time.After(200 * time.Millisecond):
				}
				whole <- c.Request().Context().Err()
			}
			return err
		})
	})
	for _, head := range []string{"Content-Length: 9\r\n\r\nab", "Transfer-Encoding: chunked\r\n\r\nffff\r\nab", "Expect: 100-continue\r\nContent-Length: 9\r\n\r\n"} {
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.WriteString(c, "POST /take HTTP/1.1\r\nHost: x\r\n"+head); err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(c)
		if err != nil || !strings.Contains(string(text), " 408 ") {
			t.Errorf("%q: %v, %q", head, err, text)
		}
	}
	for _, path := range []string{"/take", "/take?by=net/http"} {
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+s.Addr()+path, strings.NewReader("ab"))
		req.Header.Set("X-Long", "1")
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		if err := <-whole; err != nil || res.StatusCode != 200 {
			t.Errorf("%s: a body that came: %v, %d", path, err, res.StatusCode)
		}
	}
}

func TestConnectionsBeyondTheLimitAreClosed(t *testing.T) {
	s := start(t, Options{MaxConns: 2}, nil)
	dial := func() net.Conn {
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		return c
	}
	ask := func(c net.Conn) (int, error) {
		if _, err := io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			return 0, err
		}
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			return 0, err
		}
		res.Body.Close()
		return res.StatusCode, nil
	}
	first, second := dial(), dial()
	for _, c := range []net.Conn{first, second} {
		if status, err := ask(c); status != 200 {
			t.Fatalf("within the limit: %d, %v", status, err)
		}
	}
	if status, err := ask(dial()); err == nil {
		t.Errorf("beyond the limit: status %d, want a closed connection", status)
	}
	first.Close()
	for { // the server notices the end by itself
		status, err := ask(dial())
		if status == 200 {
			break
		}
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Fatal(err)
		}
	}
}

func TestAllowGuardsAllButHealth(t *testing.T) {
	deny := func(*http.Request) *api.Error { return &api.Error{Code: 403, Type: api.TypePermission, Message: "no"} }
	s := start(t, Options{Allow: deny, Registry: NewRegistry()}, func(e *echo.Echo) {
		e.GET("/x", func(c echo.Context) error { return c.String(200, "secret") })
	})
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 200, "/x": 403, "/metrics": 403, "/nothing": 403, "/healthz/": 403} {
		if status, body := s.get(t, path); status != want || strings.Contains(body, "secret") {
			t.Errorf("%s: %d %s, want %d", path, status, body, want)
		}
	}
}

func TestHeadersAreBounded(t *testing.T) {
	s := start(t, Options{}, nil)
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	go func() {
		_, _ = io.WriteString(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n")
		for range 100 { // the server may close before all is written
			_, _ = io.WriteString(c, "X-Big: "+strings.Repeat("a", 4000)+"\r\n")
		}
	}()
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err == nil && res.StatusCode != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("400 KB of headers: status %d, want 431", res.StatusCode)
	}
}

// overPipe serves one client over a pipe, in a bubble whose time passes at once; then the server ends.
func overPipe(t *testing.T, f func(t *testing.T, client net.Conn)) {
	t.Helper()
	s, err := New(Options{Listen: "127.0.0.1:0", Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	s.Close()
	synctest.Test(t, func(t *testing.T) {
		ln := &servetest.Pipes{Conns: make(chan net.Conn)}
		s.listener = ln
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.Serve(ctx) }()
		client, server := net.Pipe()
		ln.Conns <- server
		f(t, client)
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestSlowHeadersAndIdleConnectionsAreCut(t *testing.T) {
	for name, k := range map[string]struct {
		first string        // sent at once
		drip  time.Duration // between further header lines
		limit time.Duration
	}{
		"nothing is sent":        {"", 0, readHeaderTimeout},
		"half a head":            {"GET /healthz HTTP/1.1\r\nHost: x\r\n", 0, readHeaderTimeout},
		"a header line a second": {"GET /healthz HTTP/1.1\r\nHost: x\r\n", time.Second, readHeaderTimeout},
		"no second request":      {"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n", 0, idleTimeout},
	} {
		overPipe(t, func(t *testing.T, client net.Conn) {
			var writer sync.WaitGroup
			defer writer.Wait()
			defer client.Close()
			began := time.Now()
			writer.Go(func() {
				_, err := io.WriteString(client, k.first)
				for n := 0; k.drip > 0 && err == nil; n++ {
					time.Sleep(k.drip)
					_, err = io.WriteString(client, "X: y\r\n")
				}
			})
			_, _ = io.Copy(io.Discard, client) // until the server closes it
			if took := time.Since(began); took < k.limit-time.Second || took > k.limit+2*time.Second {
				t.Errorf("%s: cut after %s, want %s", name, took, k.limit)
			}
		})
	}
}

func TestClientsThatReadNothingAreCut(t *testing.T) {
	for name, request := range map[string]string{
		"net/http":     "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
		"our own loop": "POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
	} {
		overPipe(t, func(t *testing.T, client net.Conn) {
			defer client.Close()
			began := time.Now()
			_ = client.SetWriteDeadline(began.Add(time.Hour))
			var err error
			for err == nil { // until the server closes it
				_, err = io.WriteString(client, request)
			}
			if took := time.Since(began); !errors.Is(err, io.ErrClosedPipe) || took > idleTimeout+2*time.Second {
				t.Errorf("%s: after %s: %v, want it closed after %s", name, took, err, idleTimeout)
			}
		})
	}
}
