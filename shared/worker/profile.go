package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/rows"
)

// Profiler opens and ends profile windows. *ranks.Group is one.
type Profiler interface {
	// StartProfile answers once the window is scheduled, or why it cannot be.
	StartProfile(ctx context.Context, r rows.ProfileRequest) (rows.ProfileWindow, error)
	// StopProfile ends the window and waits for its files, or says how the one before came out. A window without files
	// was cancelled before it began.
	StopProfile(ctx context.Context) (rows.ProfileWindow, error)
}

// maxProfileBody bounds the body of POST /start_profile.
const maxProfileBody = 64 << 10

// startProfile is POST /start_profile.
func (n *Node) startProfile(c echo.Context) error {
	r, err := parseProfile(http.MaxBytesReader(c.Response(), c.Request().Body, maxProfileBody))
	if err != nil {
		return api.Invalid("body", "the body is no profile request: %v", err)
	}
	w, err := n.o.Profiler.StartProfile(c.Request().Context(), r)
	if err != nil {
		return profileError(err)
	}
	return c.JSON(http.StatusOK, profileAnswer{"scheduled", w})
}

// parseProfile reads one JSON object and nothing behind it; all is optional, the object too.
func parseProfile(body io.Reader) (rows.ProfileRequest, error) {
	var r rows.ProfileRequest
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil {
		if errors.Is(err, io.EOF) {
			return rows.ProfileRequest{}, nil
		}
		return rows.ProfileRequest{}, err
	}
	switch _, err := d.Token(); {
	case err == nil:
		return rows.ProfileRequest{}, errors.New("something follows the object")
	case !errors.Is(err, io.EOF):
		return rows.ProfileRequest{}, fmt.Errorf("after the object: %w", err)
	}
	return r, nil
}

// stopProfile is POST /stop_profile.
func (n *Node) stopProfile(c echo.Context) error {
	w, err := n.o.Profiler.StopProfile(c.Request().Context())
	if err != nil {
		return profileError(err)
	}
	status := "written"
	if len(w.Files) == 0 {
		status, w.Files = "cancelled", []string{}
	}
	return c.JSON(http.StatusOK, profileAnswer{status, w})
}

// profileAnswer is what both routes answer.
type profileAnswer struct {
	Status string `json:"status"` // scheduled, written, cancelled
	rows.ProfileWindow
}

func profileError(err error) *api.Error {
	e := &api.Error{Code: http.StatusServiceUnavailable, Type: api.TypeUnavailable, Stage: "profile", Message: err.Error()}
	switch {
	case errors.Is(err, rows.ErrProfileInvalid):
		e.Code, e.Type = http.StatusBadRequest, api.TypeInvalid
	case errors.Is(err, rows.ErrProfileBusy), errors.Is(err, rows.ErrProfileNone):
		e.Code, e.Type = http.StatusConflict, api.TypeInvalid
	}
	return e
}
