package serve

import (
	"errors"
	"fmt"
	"net/http"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"meridian.internal/shared/api"
)

// NewRegistry is a registry with the process's and the Go runtime's own metrics.
func NewRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return r
}

func (s *Server) adminRoutes() {
	probe := []string{http.MethodGet, http.MethodHead} // balancers ask with either
	s.echo.Match(probe, "/healthz", func(c echo.Context) error { return answer(c, s.o.Healthy) })
	s.echo.Match(probe, "/readyz", func(c echo.Context) error {
		if s.Draining() {
			return answer(c, func() error { return ErrDraining })
		}
		return answer(c, s.o.Ready)
	})
	if s.o.Registry != nil {
		s.echo.GET("/metrics", echo.WrapHandler(promhttp.HandlerFor(s.o.Registry, promhttp.HandlerOpts{EnableOpenMetrics: true})))
	}
}

// allow asks Options.Allow before every route but health and readiness, and before the answer that there is no such route.
func (s *Server) allow(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if p := c.Path(); p != "/healthz" && p != "/readyz" {
			if e := s.o.Allow(c.Request()); e != nil {
				return e
			}
		}
		return next(c)
	}
}

func answer(c echo.Context, check func() error) error {
	c.Response().Header().Set("Cache-Control", "no-store")
	if check != nil {
		if err := check(); err != nil {
			return c.JSON(http.StatusServiceUnavailable, map[string]string{"status": "unavailable", "reason": err.Error()})
		}
	}
	return c.JSON(http.StatusOK, map[string]string{"status": "ok"})
}

// handleError is the one place where an error of a handler becomes a status. It does nothing once the answer has begun:
// a stream reports its own end.
func (s *Server) handleError(err error, c echo.Context) {
	if c.Response().Committed {
		return
	}
	e := apiError(err)
	switch path := c.Request().URL.Path; {
	case errors.Is(err, echo.ErrNotFound):
		e.Message = fmt.Sprintf("there is nothing at %.100q", path)
	case errors.Is(err, echo.ErrMethodNotAllowed):
		e.Message = fmt.Sprintf("%.100q does not take %.20s", path, c.Request().Method)
	}
	if e.Status() >= http.StatusInternalServerError && e.Status() != http.StatusServiceUnavailable {
		s.o.Logger.Error("request failed", "method", c.Request().Method, "path", c.Path(), "error", err)
	}
	e.SetHeader(c.Response().Header())
	c.Response().WriteHeader(e.Status())
	if c.Request().Method != http.MethodHead {
		_, _ = c.Response().Write(e.Append(nil)) // the client is gone if this fails
	}
}

func apiError(err error) *api.Error {
	var known *api.Error
	if errors.As(err, &known) {
		return known
	}
	var he *echo.HTTPError
	if !errors.As(err, &he) {
		return &api.Error{Code: http.StatusInternalServerError, Type: api.TypeServer, Message: err.Error()}
	}
	e := &api.Error{Code: he.Code, Type: api.TypeInvalid, Message: http.StatusText(he.Code)}
	if text, ok := he.Message.(string); ok {
		e.Message = text
	}
	switch {
	case he.Code == http.StatusNotFound:
		e.Type = api.TypeNotFound
	case he.Code >= http.StatusInternalServerError:
		e.Type = api.TypeServer
	}
	return e
}
