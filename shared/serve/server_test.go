package serve

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
)

var quiet = slog.New(slog.DiscardHandler)

type running struct {
	*Server
	stop  context.CancelFunc
	ended chan error
}

func start(t *testing.T, o Options, routes func(*echo.Echo)) *running {
	t.Helper()
	o.Listen, o.Logger = "127.0.0.1:0", quiet
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	if routes != nil {
		routes(s.Echo())
	}
	ctx, stop := context.WithCancel(t.Context())
	r := &running{s, stop, make(chan error, 1)}
	go func() { r.ended <- s.Serve(ctx) }()
	t.Cleanup(stop)
	return r
}

func (r *running) get(t *testing.T, path string) (int, string) {
	t.Helper()
	return r.ask(t, http.MethodGet, path)
}

func (r *running) ask(t *testing.T, method, path string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, method, "http://"+r.Addr()+path, nil)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

func TestAdminRoutes(t *testing.T) {
	sick := func() error { return errors.New("no engine") }
	cases := []struct {
		name   string
		o      Options
		path   string
		status int
		text   string
	}{
		{"a server is healthy while it serves", Options{}, "/healthz", 200, "ok"},
		{"a server is ready while it serves", Options{}, "/readyz", 200, "ok"},
		{"a sick server says why", Options{Healthy: sick}, "/healthz", 503, "no engine"},
		{"an unready server says why", Options{Ready: sick}, "/readyz", 503, "no engine"},
		{"metrics of the process are there", Options{Registry: NewRegistry()}, "/metrics", 200, "process_cpu_seconds_total"},
		{"metrics without a registry are not", Options{}, "/metrics", 404, "not_found_error"},
		{"a handler's api error keeps its status", Options{}, "/api", 400, `"param":"max_tokens"`},
		{"any other error is a 500", Options{}, "/other", 500, "server_error"},
		{"an unknown method is refused", Options{}, "/post", 405, `\"/post\" does not take GET`},
		{"an unknown route is named", Options{}, "/nowhere", 404, `there is nothing at \"/nowhere\"`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := start(t, c.o, func(e *echo.Echo) {
				e.GET("/api", func(echo.Context) error { return api.Invalid("max_tokens", "too many") })
				e.GET("/other", func(echo.Context) error { return errors.New("x") })
				e.POST("/post", func(echo.Context) error { return nil })
			})
			if status, body := s.get(t, c.path); status != c.status || !strings.Contains(body, c.text) {
				t.Errorf("got %d %s, want %d with %q", status, body, c.status, c.text)
			}
		})
	}
}

func TestBalancersMayAskWithHead(t *testing.T) {
	s := start(t, Options{Ready: func() error { return errors.New("no engine") }}, nil)
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 503, "/metrics": 404} {
		if status, body := s.ask(t, http.MethodHead, path); status != want || body != "" {
			t.Errorf("HEAD %s: %d %q, want %d", path, status, body, want)
		}
	}
}

// slow is a route that says when it was reached and then waits for the end of its context or of the test's channel.
func slow(reached, finish chan struct{}) func(*echo.Echo) {
	return func(e *echo.Echo) {
		e.GET("/slow", func(c echo.Context) error {
			close(reached)
			select {
			case <-finish:
				return c.String(http.StatusOK, "finished")
			case <-c.Request().Context().Done():
				return c.String(http.StatusOK, context.Cause(c.Request().Context()).Error())
			}
		})
	}
}

func TestDrainLetsRunningRequestsFinish(t *testing.T) {
	reached, finish, answer := make(chan struct{}), make(chan struct{}), make(chan string, 1)
	s := start(t, Options{Grace: time.Minute}, slow(reached, finish))
	go func() {
		_, body := s.get(t, "/slow")
		answer <- body
	}()
	<-reached
	s.stop()
	for !s.Draining() {
		runtime.Gosched()
	}
	close(finish)
	if got := <-answer; got != "finished" {
		t.Errorf("answer %q, want finished", got)
	}
	if err := <-s.ended; err != nil {
		t.Error(err)
	}
	if status, _ := s.get(t, "/healthz"); status != 0 {
		t.Errorf("status %d after the end, want no connection", status)
	}
}

func TestGraceEndsRequestsThatDoNotFinish(t *testing.T) {
	reached, answer := make(chan struct{}), make(chan string, 1)
	s := start(t, Options{Grace: time.Millisecond}, slow(reached, nil))
	go func() {
		_, body := s.get(t, "/slow")
		answer <- body
	}()
	<-reached
	s.stop()
	if got := <-answer; !strings.Contains(got, "stops") {
		t.Errorf("answer %q, want that the server stops", got)
	}
	if err := <-s.ended; err != nil {
		t.Error(err)
	}
}

func TestBadListenAddressNamesTheOption(t *testing.T) {
	if _, err := New(Options{Listen: "nowhere"}); err == nil || !strings.Contains(err.Error(), `--listen "nowhere"`) {
		t.Errorf("error %v", err)
	}
}
