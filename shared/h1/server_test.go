package h1

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

type fixture struct {
	*Server
	addr   string
	others chan net.Conn
	ended  chan struct{} // one for each connection that was closed
}

func serve(t *testing.T, h http.HandlerFunc) *fixture {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &fixture{addr: l.Addr().String(), others: make(chan net.Conn, 8), ended: make(chan struct{}, 64)}
	f.Server = New(t.Context(), Options{
		Handler: h, Other: func(c net.Conn) { f.others <- c }, Closed: func() { f.ended <- struct{}{} },
		HeaderTime: time.Minute, IdleTime: time.Minute, MaxHead: 16 << 10, Logger: slog.New(slog.DiscardHandler),
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go f.Serve(c)
		}
	}()
	t.Cleanup(func() { l.Close(); f.Close() })
	return f
}

// soon is how long a test waits for what comes at once where nothing is broken; megabytes take a loaded machine a while.
const soon = 2 * time.Minute

// within waits for a value.
func within[T any](t *testing.T, ch <-chan T, what string) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(soon):
		t.Fatalf("%s: not after %s", what, soon)
	}
	return v
}

func (f *fixture) dial(t *testing.T) (net.Conn, *bufio.Reader) {
	t.Helper()
	c, err := net.Dial("tcp", f.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(soon))
	return c, bufio.NewReader(c)
}

func ask(body string) string {
	return fmt.Sprintf("POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\nX-A: b\r\n\r\n%s", len(body), body)
}

func answer(t *testing.T, r *bufio.Reader) (*http.Response, string) {
	t.Helper()
	res, err := http.ReadResponse(r, nil)
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res, string(b)
}

// echo answers as the body says.
func echo(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	switch string(body) {
	case "stream":
		for i := range 3 {
			fmt.Fprintf(w, "part %d;", i)
			_ = http.NewResponseController(w).Flush()
		}
		_, _ = io.WriteString(w, "end")
	case "none":
		w.WriteHeader(http.StatusNoContent)
	case "panic":
		panic("x")
	case "long":
		_, _ = w.Write(bytes.Repeat([]byte("x"), 1<<20))
	case "lies":
		w.Header().Set("Content-Length", "5")
		_, _ = io.WriteString(w, "abc")
	case "lines":
		w.Header().Set("X-B", "a\r\nX-C: d")
	default:
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprintf(w, "%s %s %s %s %s", r.Method, r.URL.Path, r.Host, r.Header.Get("X-A"), body)
	}
}

func TestAnswers(t *testing.T) {
	f := serve(t, echo)
	c, r := f.dial(t)
	for range 2 { // on one connection
		for body, want := range map[string]string{
			"":       "POST /x h b ",
			"hi":     "POST /x h b hi",
			"stream": "part 0;part 1;part 2;end",
			"none":   "",
			"long":   strings.Repeat("x", 1<<20),
			"lines":  "",
		} {
			if _, err := io.WriteString(c, ask(body)); err != nil {
				t.Fatal(err)
			}
			res, got := answer(t, r)
			if got != want || res.Close || res.Header.Get("Date") == "" || res.Header.Get("X-C") != "" {
				t.Errorf("%q: %.80q, %v", body, got, res.Header)
			}
			if (len(res.TransferEncoding) > 0) != (body == "stream" || body == "long") {
				t.Errorf("%q: transfer encoding %v", body, res.TransferEncoding)
			}
		}
	}
}

func TestPipelinedRequestsAreAnsweredInTurn(t *testing.T) {
	f := serve(t, echo)
	c, r := f.dial(t)
	if _, err := io.WriteString(c, ask("1")+ask("stream")+ask("none")+ask("2")); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"POST /x h b 1", "part 0;part 1;part 2;end", "", "POST /x h b 2"} {
		if _, got := answer(t, r); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// What comes while a request is served is not forgotten: the next request, or the end of the connection.
func TestWhatComesWhileARequestIsServed(t *testing.T) {
	for name, c := range map[string]struct {
		say func(c net.Conn)
		see func(t *testing.T, r *bufio.Reader)
	}{
		"a request": {
			func(c net.Conn) { _, _ = io.WriteString(c, ask("next")) },
			func(t *testing.T, r *bufio.Reader) {
				if _, got := answer(t, r); got != "next" {
					t.Errorf("got %q", got)
				}
			},
		},
		"the end": {func(c net.Conn) { _ = c.(*net.TCPConn).CloseWrite() }, closedAfter},
	} {
		t.Run(name, func(t *testing.T) {
			serving, goOn := make(chan struct{}), make(chan struct{})
			f := serve(t, func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				if string(body) == "hold" {
					serving <- struct{}{}
					<-goOn
				}
				_, _ = w.Write(body)
			})
			conn, r := f.dial(t)
			for _, first := range []string{"1", "2"} { // the wait between two requests has its deadline from then on
				_, _ = io.WriteString(conn, ask(first))
				if _, got := answer(t, r); got != first {
					t.Errorf("got %q", got)
				}
			}
			_, _ = io.WriteString(conn, ask("hold"))
			within(t, serving, "the request is served")
			c.say(conn)
			time.Sleep(20 * time.Millisecond) // it has come
			goOn <- struct{}{}
			if _, got := answer(t, r); got != "hold" {
				t.Errorf("got %q", got)
			}
			c.see(t, r)
		})
	}
}

func TestABodyComesInPieces(t *testing.T) {
	f := serve(t, echo)
	c, r := f.dial(t)
	for _, piece := range []string{"PO", "ST /x HTTP/1.1\r\nHo", "st: h\r\nContent-Length: 4\r\n\r", "\nab", "cd"} {
		_, _ = io.WriteString(c, piece)
		time.Sleep(5 * time.Millisecond) // so that most arrive apart
	}
	if _, got := answer(t, r); got != "POST /x h  abcd" {
		t.Errorf("got %q", got)
	}
	large := strings.Repeat("y", 300<<10)
	go func() { _, _ = io.WriteString(c, ask(large)) }()
	if _, got := answer(t, r); got != "POST /x h b "+large {
		t.Errorf("got %d bytes", len(got))
	}
}

// closedAfter waits until the connection is closed by the server.
func closedAfter(t *testing.T, r *bufio.Reader) {
	t.Helper()
	if _, err := r.ReadByte(); !errors.Is(err, io.EOF) {
		t.Errorf("the connection goes on: %v", err)
	}
}

func TestConnectionsThatEnd(t *testing.T) {
	for _, body := range []string{"panic", "lies"} {
		f := serve(t, echo)
		c, r := f.dial(t)
		_, _ = io.WriteString(c, ask(body))
		_, err := io.ReadAll(r)
		if err != nil {
			t.Errorf("%s: %v", body, err)
		}
		within(t, f.ended, "the connection is closed")
	}
	f := serve(t, echo)
	c, r := f.dial(t)
	_, _ = io.WriteString(c, strings.Replace(ask("hi"), "X-A", "Connection: close\r\nX-A", 1)+ask("not served"))
	if res, got := answer(t, r); !res.Close || got != "POST /x h b hi" {
		t.Errorf("close: %v %q", res.Close, got)
	}
	closedAfter(t, r)
}

func TestABodyThatNobodyReadsEndsTheConnection(t *testing.T) {
	f := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) })
	c, r := f.dial(t)
	_, _ = io.WriteString(c, ask("small")+ask("small"))
	for range 2 { // it was here already
		if res, _ := answer(t, r); res.StatusCode != 401 || res.Close {
			t.Errorf("%d, close %t", res.StatusCode, res.Close)
		}
	}
	_, _ = io.WriteString(c, "POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\n")
	res, _ := answer(t, r)
	if res.StatusCode != 401 || !res.Close {
		t.Errorf("%d, close %t", res.StatusCode, res.Close)
	}
	closedAfter(t, r)
}

func TestOtherRequestsAreHandedOver(t *testing.T) {
	for name, in := range map[string]string{
		"another method": "GET / HTTP/1.1\r\nHost: h\r\n\r\n",
		"expect":         "POST /x HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n",
		"chunks":         "POST /x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
	} {
		f := serve(t, echo)
		c, r := f.dial(t)
		_, _ = io.WriteString(c, ask("first"))
		answer(t, r)
		_, _ = io.WriteString(c, in)
		o := within(t, f.others, "the connection is handed over")
		_ = o.SetDeadline(time.Now().Add(soon))
		got := make([]byte, len(in))
		if _, err := io.ReadFull(o, got); err != nil || string(got) != in {
			t.Errorf("%s: %v %q", name, err, got)
		}
		o.Close()
	}
}

func TestRefusedHeads(t *testing.T) {
	for _, c := range []struct {
		want int
		in   string
	}{
		{400, "POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{431, "POST /x HTTP/1.1\r\nHost: h\r\nX: " + strings.Repeat("x", 32<<10)},
		{431, "POST /x HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nX: " + strings.Repeat("x", 16<<10) + "\r\n\r\n"}, // whole, and too large
	} {
		f := serve(t, echo)
		conn, r := f.dial(t)
		_, _ = io.WriteString(conn, c.in)
		if res, _ := answer(t, r); res.StatusCode != c.want {
			t.Errorf("got %d, want %d", res.StatusCode, c.want)
		}
		closedAfter(t, r)
	}
}

func TestAClientThatLeavesEndsItsRequest(t *testing.T) {
	for name, leave := range map[string]func(*net.TCPConn){
		"closes":          func(c *net.TCPConn) { c.Close() },
		"resets":          func(c *net.TCPConn) { _ = c.SetLinger(0); c.Close() },
		"closes one half": func(c *net.TCPConn) { _ = c.CloseWrite() },
	} {
		t.Run(name, func(t *testing.T) {
			began, ended := make(chan struct{}), make(chan struct{})
			f := serve(t, func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.Copy(io.Discard, r.Body)
				_, _ = io.WriteString(w, "x")
				_ = http.NewResponseController(w).Flush()
				close(began)
				<-r.Context().Done()
				close(ended)
			})
			c, _ := f.dial(t)
			_, _ = io.WriteString(c, ask("hi"))
			within(t, began, "the handler begins")
			leave(c.(*net.TCPConn))
			within(t, ended, "the handler is told")
			within(t, f.ended, "the connection is closed")
		})
	}
}

func TestWhatIsNotTakenNowGoesOutLater(t *testing.T) {
	sent := make(chan int64, 1)
	f := serve(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		now := w.(interface {
			WriteNow(p []byte) (all bool, err error)
		})
		n, all := int64(0), true
		for all { // until there is no room: nobody reads
			var err error
			if all, err = now.WriteNow(bytes.Repeat([]byte("0123456789"), 10<<10)); err != nil {
				t.Error(err)
				return
			}
			n += 100 << 10
		}
		sent <- n // now somebody does
		_ = http.NewResponseController(w).Flush()
		if all, err := now.WriteNow([]byte("end")); !all || err != nil {
			t.Errorf("after the flush: %t, %v", all, err)
		}
	})
	c, r := f.dial(t)
	for range 2 { // on one connection
		_, _ = io.WriteString(c, ask("hi"))
		n := within(t, sent, "no room is left")
		_, got := answer(t, r)
		if want := strings.Repeat("0123456789", int(n/10)) + "end"; got != want {
			t.Errorf("got %d bytes, want %d", len(got), len(want))
		}
	}
}

func TestAClientThatTakesNothingIsCut(t *testing.T) {
	failed := make(chan error, 1)
	f := serve(t, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		_ = rc.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
		for {
			if _, err := w.Write(make([]byte, 64<<10)); err != nil {
				failed <- err
				return
			}
		}
	})
	c, _ := f.dial(t)
	_, _ = io.WriteString(c, ask("hi"))
	if err := within(t, failed, "the write ends"); err == nil || !strings.Contains(err.Error(), "timeout") {
		t.Errorf("got %v", err)
	}
	within(t, f.ended, "the connection is closed")
}

func TestDrain(t *testing.T) {
	began, finish := make(chan struct{}), make(chan struct{})
	f := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-A") == "short" {
			return
		}
		close(began)
		<-finish
	})
	_, idle := f.dial(t)
	again, answers := f.dial(t)
	for range 3 {
		_, _ = io.WriteString(again, strings.Replace(ask("hi"), "X-A: b", "X-A: short", 1))
		answer(t, answers)
	}
	c, r := f.dial(t)
	_, _ = io.WriteString(c, ask("hi"))
	within(t, began, "the handler begins")
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if f.Drain(short) == nil {
		t.Error("drained while a request ran")
	}
	closedAfter(t, idle)
	closedAfter(t, answers)
	close(finish)
	if res, _ := answer(t, r); res.StatusCode != 200 || !res.Close {
		t.Errorf("%d, close %t", res.StatusCode, res.Close)
	}
	long, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	if err := f.Drain(long); err != nil {
		t.Error(err)
	}
}

func BenchmarkRequest(b *testing.B) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, "0123456789")
	})
	run := func(b *testing.B) {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		request, got := []byte(ask(strings.Repeat("x", 2<<10))), make([]byte, 4<<10)
		b.ReportAllocs()
		for b.Loop() {
			if _, err := c.Write(request); err != nil {
				b.Fatal(err)
			}
			if _, err := c.Read(got); err != nil {
				b.Fatal(err)
			}
		}
	}
	h1 := New(b.Context(), Options{Handler: handler, Other: func(c net.Conn) { c.Close() }, HeaderTime: time.Minute, IdleTime: time.Minute, MaxHead: 16 << 10})
	b.Run("h1", func(b *testing.B) {
		go func() {
			c, err := l.Accept()
			if err == nil {
				h1.Serve(c)
			}
		}()
		run(b)
	})
	b.Run("nethttp", func(b *testing.B) {
		srv := &http.Server{Handler: handler, ReadHeaderTimeout: time.Minute}
		go func() { _ = srv.Serve(l) }()
		run(b)
		srv.Close()
	})
}
