package h1

import (
	"bufio"
	"bytes"
	"errors"
	"net/http"
	"strings"
	"testing"
)

const ordinary = "POST /v1/completions HTTP/1.1\r\nHost: h\r\ncontent-length: 2\r\nX-A:  b \r\nX-A: c\r\n\r\n"

func TestParseHead(t *testing.T) {
	with := func(line string) string { return strings.Replace(ordinary, "X-A: c", line, 1) }
	cases := []struct {
		name, in string
		err      error
	}{
		{"ordinary", ordinary, nil},
		{"close", with("Connection: Close"), nil},
		{"kept", with("Connection: keep-alive"), nil},
		{"another method", "GET / HTTP/1.1\r\nHost: h\r\n\r\n", errOther},
		{"the beginning of another method", "PU", errOther},
		{"HTTP/1.0", strings.Replace(ordinary, "1.1", "1.0", 1), errOther},
		{"a query", strings.Replace(ordinary, "completions", "x?y", 1), errOther},
		{"an escape", strings.Replace(ordinary, "completions", "x%2fy", 1), errOther},
		{"dots", strings.Replace(ordinary, "completions", "../x", 1), errOther},
		{"an absolute target", strings.Replace(ordinary, "/v1", "http://h/v1", 1), errOther},
		{"no host", strings.Replace(ordinary, "Host: h\r\n", "", 1), errOther},
		{"no length", strings.Replace(ordinary, "content-length: 2\r\n", "", 1), errOther},
		{"chunks", strings.Replace(ordinary, "content-length: 2", "Transfer-Encoding: chunked", 1), errOther},
		{"expect", with("Expect: 100-continue"), errOther},
		{"upgrade", with("Connection: Upgrade\r\nUpgrade: h2c"), errOther},
		{"length and chunks", with("Transfer-Encoding: chunked"), errHead},
		{"chunks and length", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: h\r\nContent-Length: 2\r\n\r\n", errHead},
		{"length and chunks of an odd request", strings.Replace(with("Transfer-Encoding: x"), "completions", "?", 1), errHead},
		{"two lengths", with("Content-Length: 2"), errHead},
		{"a signed length", strings.Replace(ordinary, ": 2", ": +2", 1), errHead},
		{"a hexadecimal length", strings.Replace(ordinary, ": 2", ": 0x2", 1), errHead},
		{"two lengths in one", strings.Replace(ordinary, ": 2", ": 2, 2", 1), errHead},
		{"two hosts", with("Host: g"), errHead},
		{"an empty host and another", strings.Replace(with("Host: g"), "Host: h", "Host:", 1), errHead},
		{"space before the colon", with("X-A : c"), errHead},
		{"a folded line", with("X-A: c\r\n d"), errHead},
		{"no name", with(": c"), errHead},
		{"no colon", with("X-A"), errHead},
		{"a bare line feed", with("X-A: c\nX-B: d"), errHead},
		{"a bare line feed in what is not whole", "POST / HTTP/1.1\nHost: h\n\n", errHead},
		{"a bare carriage return", with("X-A: c\rd"), errHead},
		{"a null byte", with("X-A: c\x00d"), errHead},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var h head
			n, err := parseHead([]byte(c.in+"{}"), &h)
			if !errors.Is(err, c.err) || (err == nil) != (n == len(c.in)) {
				t.Errorf("%d of %d bytes, %v; want %v", n, len(c.in), err, c.err)
			}
		})
	}
	for n := 1; n < len(ordinary); n++ {
		if got, err := parseHead([]byte(ordinary[:n]), new(head)); got != 0 || err != nil {
			t.Fatalf("%d bytes: %d, %v", n, got, err)
		}
	}
}

// FuzzParseHead: what is ordinary means the same to net/http.
func FuzzParseHead(f *testing.F) {
	f.Add([]byte(ordinary))
	f.Add([]byte("POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"))
	f.Add([]byte("POST / HTTP/1.1\r\nHost: h\nContent-Length: 1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) == 0 {
			return
		}
		var h head
		n, err := parseHead(in, &h)
		if err != nil && !errors.Is(err, errHead) && !errors.Is(err, errOther) {
			t.Fatal(err)
		}
		if n == 0 {
			return
		}
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(in)))
		if err != nil {
			t.Fatalf("%q is ordinary here, and to net/http: %v", in[:n], err)
		}
		if r.Method != http.MethodPost || r.URL.Path != h.path || r.URL.RawQuery != "" || r.Host != h.host || r.ContentLength != h.length || r.Close != h.close {
			t.Errorf("%q: %+v, net/http has %+v", in[:n], h, r)
		}
		for _, v := range h.fields {
			if r.Header.Get(v.name) == "" && v.value != "" {
				t.Errorf("%q: net/http has no %s", in[:n], v.name)
			}
		}
	})
}
