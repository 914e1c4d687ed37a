package upstream

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"meridian.internal/shared/sock"
)

func get(t *testing.T, c *Client, url, body string) (int, string) {
	t.Helper()
	res, err := c.Do(t.Context(), &Request{URL: url, Path: "/x", Body: [][]byte{[]byte(body)}, Header: []byte("X-A: b\r\n")})
	if err != nil {
		t.Fatal(err)
	}
	defer res.Close()
	out, err := io.ReadAll(res)
	if err != nil {
		t.Fatal(err)
	}
	return res.Status, string(out)
}

func TestDoSpeaksWithNetHTTP(t *testing.T) {
	var conns atomic.Int64
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Retry-After", "3")
		switch string(body) {
		case "stream":
			for i := range 3 {
				fmt.Fprintf(w, "part %d;", i)
				w.(http.Flusher).Flush()
			}
		case "large":
			io.WriteString(w, strings.Repeat("x", 1<<20))
		case "none":
			w.WriteHeader(http.StatusNoContent)
		case "close":
			w.Header().Set("Connection", "close")
			io.WriteString(w, "bye")
		default:
			w.WriteHeader(http.StatusTeapot)
			fmt.Fprintf(w, "%s %s %s %s", r.Method, r.URL.Path, r.Header.Get("X-A"), body)
		}
	}))
	s.Config.ConnState = func(_ net.Conn, st http.ConnState) {
		if st == http.StateNew {
			conns.Add(1)
		}
	}
	s.Start()
	defer s.Close()
	c := New(Options{})
	defer c.Close()
	for range 3 {
		if status, body := get(t, c, s.URL, "hi"); status != 418 || body != "POST /x b hi" {
			t.Errorf("got %d %q", status, body)
		}
		if _, body := get(t, c, s.URL, "stream"); body != "part 0;part 1;part 2;" {
			t.Errorf("got %q", body)
		}
		if _, body := get(t, c, s.URL, "large"); len(body) != 1<<20 {
			t.Errorf("got %d bytes", len(body))
		}
		if status, _ := get(t, c, s.URL, "none"); status != 204 {
			t.Errorf("got %d", status)
		}
	}
	if conns.Load() != 1 || c.Idle() != 1 {
		t.Errorf("%d connections for 12 requests in a row, %d idle; want 1, 1", conns.Load(), c.Idle())
	}
	if _, body := get(t, c, s.URL, "close"); body != "bye" || c.Idle() != 0 {
		t.Errorf("got %q, %d idle", body, c.Idle())
	}
}

func TestABodyInPieces(t *testing.T) {
	var got atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.HasSuffix(string(body), "xtail") && int64(len(body)) == r.ContentLength {
			got.Add(r.ContentLength)
		}
	}))
	defer s.Close()
	c := New(Options{})
	defer c.Close()
	for _, n := range []int{1, copyBelow, 1 << 20} {
		res, err := c.Do(t.Context(), &Request{URL: s.URL, Path: "/", Body: [][]byte{[]byte(strings.Repeat("x", n-1)), []byte("x")}, Tail: []byte("tail")})
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, res)
		if got.Swap(0) != int64(n+4) {
			t.Errorf("a body of %d bytes and a tail did not arrive", n)
		}
	}
}

func TestKeptConnectionThatWasClosedIsReplaced(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "ok") }))
	defer s.Close()
	c := New(Options{})
	defer c.Close()
	get(t, c, s.URL, "")
	s.CloseClientConnections()
	time.Sleep(2 * fresh) // then it is looked at
	if _, body := get(t, c, s.URL, ""); body != "ok" {
		t.Errorf("got %q", body)
	}
}

func TestARequestThatANodeMayHaveTakenIsNotSentAgain(t *testing.T) {
	var asked atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) > 1 {
			panic(http.ErrAbortHandler)
		}
	}))
	defer s.Close()
	c := New(Options{})
	defer c.Close()
	get(t, c, s.URL, "")
	if _, err := c.Do(t.Context(), &Request{URL: s.URL, Path: "/"}); !errors.Is(err, errNoAnswer) {
		t.Errorf("got %v", err)
	}
	if asked.Load() != 2 {
		t.Errorf("the node was asked %d times, want 2", asked.Load())
	}
}

func TestCancelClosesTheConnection(t *testing.T) {
	gone := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "first")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(gone)
	}))
	defer s.Close()
	c := New(Options{})
	ctx, cancel := context.WithCancelCause(t.Context())
	res, err := c.Do(ctx, &Request{URL: s.URL, Path: "/", Body: [][]byte{[]byte("x")}})
	if err != nil {
		t.Fatal(err)
	}
	defer res.Close()
	if _, err := io.ReadFull(res, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	why := errors.New("why")
	cancel(why)
	if _, err := res.Read(make([]byte, 5)); !errors.Is(err, why) {
		t.Errorf("got %v, want the cause", err)
	}
	<-gone
	if c.Idle() != 0 {
		t.Error("a cancelled connection was kept")
	}
}

func TestDoRefusesBadTargets(t *testing.T) {
	for _, u := range []string{"", "x", "ftp://h", "http://", "://"} {
		if _, err := New(Options{}).Do(t.Context(), &Request{URL: u}); !errors.Is(err, ErrTarget) {
			t.Errorf("%q: got %v", u, err)
		}
	}
}

// parse reads one answer from bytes, as a server that closes afterwards would send it.
func parse(in string, read func(*Response) ([]byte, error)) (*Response, []byte, error) {
	a, b := net.Pipe()
	go func() { io.WriteString(b, in); b.Close() }()
	c := New(Options{MaxIdle: 1})
	defer c.Close()
	r := &Response{client: c, conn: &conn{Conn: sock.New(a), host: &host{}}, ctx: context.Background(), stop: func() bool { return true }}
	defer r.Close()
	if err := r.readHead(); err != nil {
		return nil, nil, err
	}
	body, err := read(r)
	return r, body, err
}

func whole(r *Response) ([]byte, error)   { return io.ReadAll(r) }
func inParts(r *Response) ([]byte, error) { return pieces(r, r.Fill) }

func TestParseAnswers(t *testing.T) {
	const ok = "HTTP/1.1 200 OK\r\n"
	cases := []struct {
		name, in, body string
		err            error
	}{
		{"a length", ok + "Content-Length: 3\r\n\r\nabc", "abc", nil},
		{"chunks with an extension and a trailer", ok + "Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nT: v\r\n\r\n", "abcde", nil},
		{"until the connection closes", ok + "\r\nabc", "abc", nil},
		{"an interim answer", "HTTP/1.1 100 Continue\r\n\r\n" + ok + "Content-Length: 1\r\n\r\na", "a", nil},
		{"bare line feeds", "HTTP/1.1 200 OK\nContent-Length: 1\n\na", "a", nil},
		{"a body that ends early", ok + "Content-Length: 5\r\n\r\nabc", "abc", io.ErrUnexpectedEOF},
		{"a stream that ends between chunks", ok + "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n", "abc", io.ErrUnexpectedEOF},
		{"a stream that ends in a chunk", ok + "Transfer-Encoding: chunked\r\n\r\n5\r\nabc", "abc", io.ErrUnexpectedEOF},
		{"a bad chunk size", ok + "Transfer-Encoding: chunked\r\n\r\nx\r\n", "", ErrProtocol},
		{"no line end after a chunk", ok + "Transfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n", "a", ErrProtocol},
		{"a last chunk of its own form", ok + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n 000 ;x=y\r\nT: v\r\nU: w\r\n\r\n", "a", nil},
		{"a chunk's line without end", ok + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n1;" + strings.Repeat("x", 200000), "a", ErrProtocol},
		{"a trailer without end", ok + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nT:" + strings.Repeat("x", 200000), "a", ErrProtocol},
		{"trailers without end", ok + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n" + strings.Repeat("T: v\r\n", 20000), "a", ErrProtocol},
		{"the same length twice", ok + "Content-Length: 1\r\nContent-Length: 1\r\n\r\na", "a", nil},
		{"two lengths", ok + "Content-Length: 1\r\nContent-Length: 2\r\n\r\nab", "", ErrProtocol},
		{"a negative length", ok + "Content-Length: -1\r\n\r\n", "", ErrProtocol},
		{"another transfer encoding", ok + "Transfer-Encoding: gzip\r\n\r\n", "", ErrProtocol},
		{"no HTTP", "SSH-2.0-x\r\n\r\n", "", ErrProtocol},
		{"a status beyond numbers", "HTTP/1.1 9999\r\n\r\n", "", ErrProtocol},
		{"a header without a colon", ok + "x\r\n\r\n", "", ErrProtocol},
		{"a head without end", ok + strings.Repeat("X: y\r\n", 20000), "", ErrProtocol},
		{"a line without end", ok + strings.Repeat("x", 20000), "", ErrProtocol},
		{"an early end", "HTTP/1.1 200", "", io.ErrUnexpectedEOF},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for _, read := range []func(*Response) ([]byte, error){whole, inParts} {
				_, body, err := parse(c.in, read)
				if string(body) != c.body || !errors.Is(err, c.err) {
					t.Errorf("got %q, %v; want %q, %v", body, err, c.body, c.err)
				}
			}
		})
	}
}

// pieces reads a body as a relay does: what is here, then more.
func pieces(r *Response, fill func() error) (body []byte, err error) {
	for {
		b, err := r.Next()
		switch {
		case errors.Is(err, io.EOF):
			return body, nil
		case err != nil:
			return body, err
		case len(b) == 0:
			_ = fill() // Next says what it met
		}
		body = append(body, b...)
	}
}

// TestNextNeverWaits: wherever a body is cut off, Next gives what is there. A loop that passes on the streams of many calls it.
func TestNextNeverWaits(t *testing.T) {
	const body = "3\r\nabc\r\n 4 ;x=y\r\ndefg\r\n0;z\r\nT: v\r\n\r\n"
	for n := range len(body) + 1 {
		a, b := net.Pipe()
		r := &Response{client: New(Options{}), conn: &conn{Conn: sock.New(a), host: &host{}}, ctx: context.Background(), stop: func() bool { return true }}
		go func() { _, _ = io.WriteString(b, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"+body[:n]) }()
		if err := r.readHead(); err != nil {
			t.Fatal(err)
		}
		got, ended := "", make(chan error, 1)
		go func() {
			for {
				piece, err := r.Next()
				if got += string(piece); err != nil || len(piece) == 0 {
					ended <- err
					return
				}
			}
		}()
		select {
		case err := <-ended:
			if whole := n == len(body); errors.Is(err, io.EOF) != whole || err != nil && !whole {
				t.Errorf("behind %q: %v", body[:n], err)
			}
			if !strings.HasPrefix("abcdefg", got) || n > len("3\r\nabc") && len(got) < 3 {
				t.Errorf("behind %q: got %q", body[:n], got)
			}
		case <-time.After(time.Minute):
			t.Fatalf("behind %q it waits", body[:n])
		}
		b.Close()
		_ = r.Close()
	}
}

// TestADrainedConnectionIsKept: one whose body's end came a moment late is used again, however long that was ago.
func TestADrainedConnectionIsKept(t *testing.T) {
	var opened atomic.Int32
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "hello")
		w.(http.Flusher).Flush()
		time.Sleep(5 * time.Millisecond) // the end comes apart
	}))
	s.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			opened.Add(1)
		}
	}
	s.Start()
	defer s.Close()
	c := New(Options{IdleTimeout: time.Minute})
	defer c.Close()
	const limit = 20 * time.Millisecond
	for range 3 {
		res, err := c.Do(t.Context(), &Request{URL: s.URL, Path: "/"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(res, make([]byte, len("hello"))); err != nil {
			t.Fatal(err)
		}
		if res.Drain(limit); c.Idle() == 0 {
			t.Skip("this machine is slow: the end came later than it is waited for")
		}
		time.Sleep(2 * limit) // the drain's limit has passed
	}
	if n := opened.Load(); n != 1 {
		t.Errorf("%d connections for 3 requests in turn, want 1", n)
	}
}

func TestAStreamThatWaitsHoldsNothing(t *testing.T) {
	a, b := net.Pipe()
	defer b.Close()
	go func() { _, _ = io.WriteString(b, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n") }()
	r := &Response{client: New(Options{}), conn: &conn{Conn: sock.New(a), host: &host{}}, ctx: context.Background(), stop: func() bool { return true }}
	defer r.Close()
	if err := r.readHead(); err != nil {
		t.Fatal(err)
	}
	for got := ""; got != "abc"; {
		piece, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if got += string(piece); len(piece) == 0 {
			_ = r.Fill() // Next says what it met
		}
	}
	if rest := r.conn.Buffered(); len(rest) > 0 {
		t.Errorf("%q is held until the next chunk", rest)
	}
}

func FuzzParse(f *testing.F) {
	f.Add("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
	f.Add("HTTP/1.0 503 no\nContent-Length: 2\n\nab")
	f.Fuzz(func(t *testing.T, in string) {
		_, body, err := parse(in, whole)
		_, same, again := parse(in, inParts)
		if !bytes.Equal(body, same) || (err == nil) != (again == nil) {
			t.Errorf("whole: %q, %v; in pieces: %q, %v", body, err, same, again)
		}
		if err != nil && !errors.Is(err, ErrProtocol) && !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("undocumented error %v", err)
		}
	})
}

func TestReadTakesWhatIsThereAcrossChunksAndNeverWaitsForMore(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	more := make(chan struct{})
	go func() {
		nc, err := l.Accept()
		if err != nil {
			return
		}
		defer nc.Close()
		if _, err := http.ReadRequest(bufio.NewReader(nc)); err != nil {
			return
		}
		// Two whole chunks and the size line of a third, cut in the middle.
		io.WriteString(nc, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n1")
		<-more
		io.WriteString(nc, "0\r\n0123456789abcdef\r\n0\r\n\r\n")
		<-more
	}()
	c := New(Options{})
	defer c.Close()
	defer close(more)
	res, err := c.Do(t.Context(), &Request{URL: "http://" + l.Addr().String(), Path: "/"})
	if err != nil {
		t.Fatal(err)
	}
	defer res.Close()
	var buf [64]byte
	if n, err := res.Read(buf[:]); err != nil || string(buf[:n]) != "abcde" {
		t.Fatalf("first read: %q, %v", buf[:n], err)
	}
	if res.Ready() {
		t.Error("ready, though the next chunk's size is not there")
	}
	more <- struct{}{}
	if n, err := res.Read(buf[:]); err != nil || string(buf[:n]) != "0123456789abcdef" {
		t.Fatalf("second read: %q, %v", buf[:n], err)
	}
	if !res.finished {
		t.Error("the end that came with the last chunk was not taken in")
	}
	if n := c.Idle(); n != 1 {
		t.Errorf("%d idle connections, want the one that was read to its end", n)
	}
	if n, err := res.Read(buf[:]); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("read after the end: %d, %v", n, err)
	}
}

// A body that nobody reads to its end gives its connection back when its rest is there.
func TestDrainTakesTheRest(t *testing.T) {
	for name, flush := range map[string]bool{"chunks": true, "a length": false} {
		t.Run(name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				for range 20 {
					io.WriteString(w, strings.Repeat("x", 100))
					if flush {
						w.(http.Flusher).Flush()
					}
				}
			}))
			defer s.Close()
			c := New(Options{})
			defer c.Close()
			res, err := c.Do(t.Context(), &Request{URL: s.URL, Path: "/"})
			if err != nil {
				t.Fatal(err)
			}
			res.Drain(time.Minute)
			if c.Idle() != 1 {
				t.Errorf("%d connections are idle, want 1", c.Idle())
			}
		})
	}
}
