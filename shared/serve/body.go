package serve

import (
	"errors"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
)

// timeBodies bounds the time in which the body of a request comes: one that stays away would hold its handler for ever.
func timeBodies(limit time.Duration) echo.MiddlewareFunc {
	return func(next echo.HandlerFunc) echo.HandlerFunc {
		return func(c echo.Context) error {
			if r := c.Request(); r.ContentLength != 0 {
				r.Body = &timedBody{ReadCloser: r.Body, limit: limit, control: http.NewResponseController(c.Response())}
			}
			return next(c)
		}
	}
}

type timedBody struct {
	io.ReadCloser
	limit   time.Duration
	control *http.ResponseController
	begun   bool
}

// Read is io.Reader's.
func (b *timedBody) Read(p []byte) (int, error) {
	if !b.begun {
		b.begun = true
		_ = b.control.SetReadDeadline(time.Now().Add(b.limit)) // a writer in tests has none
	}
	n, err := b.ReadCloser.Read(p)
	switch {
	case errors.Is(err, io.EOF):
		_ = b.control.SetReadDeadline(time.Time{})
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = api.BodyLate(b.limit)
	}
	return n, err
}
