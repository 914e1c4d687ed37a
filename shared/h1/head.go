package h1

import (
	"bytes"
	"errors"
	"net/textproto"
	"strconv"
	"strings"
)

var (
	// errOther says that a request is not of the ordinary form.
	errOther = errors.New("h1: not of the ordinary form")
	// errHead is returned when a head is no HTTP/1.1, or could be read in two ways.
	errHead = errors.New("h1: malformed head")
)

// head is a parsed request head. Its strings share the memory of one.
type head struct {
	path   string
	host   string
	length int64 // -1: not said
	hosted bool  // a host was said, if an empty one
	other  bool  // not of the ordinary form
	coded  bool  // it has a transfer encoding
	close  bool  // the client wants no further request on the connection
	fields []field
}

type field struct{ name, value string }

var (
	post    = []byte("POST ")
	endMark = []byte("\r\n\r\n")
)

// parseHead reads a head at the start of b and returns its length; 0: it has not come as a whole.
func parseHead(b []byte, h *head) (int, error) {
	if n := min(len(b), len(post)); !bytes.Equal(b[:n], post[:n]) {
		return 0, errOther
	}
	n := bytes.Index(b, endMark)
	if n < 0 {
		return 0, bareLF(b)
	}
	text := string(b[:n+2]) // with the last line's end
	*h = head{length: -1, fields: h.fields[:0]}
	line, rest, ok := cutLine(text)
	if !ok {
		return 0, errHead
	}
	h.start(line)
	for rest != "" {
		if line, rest, ok = cutLine(rest); !ok {
			return 0, errHead
		}
		if err := h.field(line); err != nil {
			return 0, err
		}
	}
	switch {
	case h.coded && h.length >= 0:
		return 0, errHead // smuggling lives on it
	case h.other || h.coded || h.length < 0 || h.host == "":
		return 0, errOther
	}
	return n + len(endMark), nil
}

// bareLF refuses a head that will never end as it should.
func bareLF(b []byte) error {
	for i := 0; ; {
		j := bytes.IndexByte(b[i:], '\n')
		if j < 0 {
			return nil
		}
		if i += j + 1; i < 2 || b[i-2] != '\r' {
			return errHead
		}
	}
}

// cutLine cuts the first line off, which must end with CR LF.
func cutLine(s string) (line, rest string, ok bool) {
	i := strings.IndexByte(s, '\n')
	if i < 1 || s[i-1] != '\r' {
		return "", "", false
	}
	return s[:i-1], s[i+1:], true
}

// start reads POST PATH HTTP/1.1.
func (h *head) start(line string) {
	path, version, _ := strings.Cut(line[min(len(post), len(line)):], " ")
	h.path = path
	if version != "HTTP/1.1" || path == "" || path[0] != '/' {
		h.other = true
		return
	}
	for i := range len(path) {
		switch c := path[i]; {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '/', c == '_', c == '-':
		case c == '.' && path[i-1] != '/' && path[i-1] != '.':
		default:
			h.other = true // a query, escapes, dots to resolve
		}
	}
}

func (h *head) field(line string) error {
	name, value, ok := strings.Cut(line, ":")
	if !ok || !token(name) {
		return errHead
	}
	value = strings.Trim(value, " \t")
	for i := range len(value) {
		if c := value[i]; c < ' ' && c != '\t' || c == 0x7f {
			return errHead
		}
	}
	switch name = textproto.CanonicalMIMEHeaderKey(name); name {
	case "Content-Length":
		n, err := strconv.ParseUint(value, 10, 62)
		if err != nil || h.length >= 0 {
			return errHead
		}
		h.length = int64(n)
	case "Host":
		if h.hosted {
			return errHead
		}
		h.host, h.hosted = value, true
		return nil // net/http keeps it out of the header too
	case "Connection":
		switch {
		case strings.EqualFold(value, "close"):
			h.close = true
		case !strings.EqualFold(value, "keep-alive"):
			h.other = true
		}
	case "Transfer-Encoding":
		h.coded = true
	case "Expect", "Upgrade", "Trailer", "Te":
		h.other = true
	}
	h.fields = append(h.fields, field{name, value})
	return nil
}

// token tells whether s is a header's name.
func token(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_':
		case c > ' ' && c < 0x7f && !strings.ContainsRune(`"(),/:;<=>?@[\]{}`, rune(c)):
		default:
			return false
		}
	}
	return s != ""
}
