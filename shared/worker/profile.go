package worker

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/rows"
)

// Profiler opens and ends profile windows. *engine.Engine is one.
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
	var r rows.ProfileRequest
	d := json.NewDecoder(io.LimitReader(c.Request().Body, maxProfileBody))
	d.DisallowUnknownFields()
	if err := d.Decode(&r); err != nil && !errors.Is(err, io.EOF) { // all is optional
		return api.Invalid("body", "the body is no profile request: %v", err)
	}
	w, err := n.o.Profiler.StartProfile(c.Request().Context(), r)
	if err != nil {
		return profileError(err)
	}
	return c.JSON(http.StatusOK, profileAnswer{"scheduled", w})
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
