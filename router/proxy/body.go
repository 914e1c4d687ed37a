package proxy

import (
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/shared/api"
)

const (
	// bodyTime bounds how long a client may take to send its body.
	bodyTime = 30 * time.Second
	// maxPromise is the memory that a body gets for its Content-Length alone; more follows as its bytes come.
	maxPromise = 128 << 10
	minBody    = 512
	// bodiesPerBody bounds the memory of all bodies where nothing is configured: so many of the largest.
	bodiesPerBody = 64
)

// bodies is the memory of the bodies of all requests that have not ended. Safe for concurrent use.
type bodies struct {
	limit int64
	used  atomic.Int64
}

// take takes n bytes more; false: they are not there, and none was taken.
func (b *bodies) take(n int64) bool {
	if b.used.Add(n) > b.limit {
		b.used.Add(-n)
		return false
	}
	return true
}

// readBody reads the body, within the limits of its size, of its time and of the memory of all bodies.
func (s *session) readBody(r *http.Request) ([]byte, *api.Error) {
	if c := r.Header.Get("Content-Encoding"); c != "" && !strings.EqualFold(c, "identity") {
		e := api.Invalid("Content-Encoding", "a body in %.40q is not taken: send it as it is", c)
		e.Code = http.StatusUnsupportedMediaType
		return nil, e
	}
	limit := s.p.o.MaxBody
	if r.ContentLength > int64(limit) {
		e := api.Invalid("", "the body has %d bytes; the limit is %d", r.ContentLength, limit)
		e.Code = http.StatusRequestEntityTooLarge
		return nil, e
	}
	_ = s.rc.SetReadDeadline(time.Now().Add(bodyTime)) // a writer in tests has none
	from := io.LimitReader(r.Body, int64(limit)+1)
	size := min(maxPromise, max(minBody, int(r.ContentLength)+1))
	body := s.usedBody(size)
	if body != nil {
		size = min(2*cap(body), limit+1)
	}
	for {
		if len(body) == cap(body) && cap(body) <= limit {
			if !s.takeBody(size - cap(body)) {
				return nil, api.Unavailable("parse", retryAfter, "the bodies of the requests that run take all the memory that this router gives them")
			}
			body = append(make([]byte, 0, size), body...)
			size = min(2*size, limit+1)
		}
		n, err := from.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		if errors.Is(err, io.EOF) {
			_ = s.rc.SetReadDeadline(time.Time{})
			if s.body == nil {
				s.body = new([]byte)
			}
			*s.body = body
			return body, nil
		}
		if err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				return nil, api.Invalid("", "the body is cut or malformed: it could not be read to its end")
			}
			return nil, api.BodyLate(bodyTime)
		}
	}
}

// usedBodies are the memory of bodies whose requests have ended.
var usedBodies sync.Pool // of *[]byte

// usedBody is memory for a body of about size bytes that another request had; nil: there is none that fits, or no room.
func (s *session) usedBody(size int) []byte {
	b, ok := usedBodies.Get().(*[]byte)
	if !ok {
		return nil
	}
	if cap(*b) < size || cap(*b)/4 > size || !s.takeBody(cap(*b)) { // a stream that may be open for long holds no more than it needs
		return nil
	}
	s.body = b
	return (*b)[:0]
}

// reuseBody lets other requests have the memory of the body. Nothing of the request goes on.
func (s *session) reuseBody() {
	if s.body != nil && cap(*s.body) <= maxPromise {
		usedBodies.Put(s.body)
	}
}

// takeBody takes memory for the body; giveBody gives back all that the request took.
func (s *session) takeBody(n int) bool {
	ok := s.p.bodies.take(int64(n))
	if ok {
		s.bodyBytes += int64(n)
	}
	return ok
}

func (s *session) giveBody() { s.p.bodies.used.Add(-s.bodyBytes) }
