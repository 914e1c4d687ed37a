package serve

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/api"
	"meridian.internal/shared/h1"
)

// DefaultGrace is how long Serve lets running requests go on after its context ended.
const DefaultGrace = 10 * time.Second

const (
	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 2 * time.Minute
	maxHeaderBytes    = 64 << 10
	hardStop          = time.Second // after the grace: for handlers to see that their context ended
)

// ErrDraining is what the readiness route says once Serve's context has ended.
var ErrDraining = errors.New("serve: draining")

// Options of a server.
type Options struct {
	Listen   string               // host:port; port 0 takes a free one
	Logger   *slog.Logger         // nil: slog.Default()
	Registry *prometheus.Registry // served at /metrics; nil: no such route
	Healthy  func() error         // nil: alive while it serves; an error is answered with 503 at /healthz
	Ready    func() error         // nil: ready while it serves; an error is answered with 503 at /readyz
	Grace    time.Duration        // 0: DefaultGrace
	// Allow says who may use a route; health and readiness are open to all. Nil: everybody may use everything.
	Allow    func(*http.Request) *api.Error
	TLS      *tls.Config   // nil: plain HTTP
	BodyTime time.Duration // in which the body of a request must come; 0: the handlers see to it
	MaxConns int           // connections at the same time; further ones are closed at once. 0: DefaultMaxConns
}

// Server is an echo server that lives under a context.
type Server struct {
	o        Options
	echo     *echo.Echo
	listener net.Listener
	draining atomic.Bool
}

// New opens the listener and registers the admin routes. Connections wait in the kernel until Serve is called.
func New(o Options) (*Server, error) {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Grace <= 0 {
		o.Grace = DefaultGrace
	}
	if o.MaxConns <= 0 {
		o.MaxConns = DefaultMaxConns
	}
	l, err := net.Listen("tcp", o.Listen)
	if err != nil {
		return nil, fmt.Errorf("--listen %q: %w", o.Listen, err)
	}
	if o.TLS != nil {
		l = tls.NewListener(boundedListener{l}, o.TLS)
	}
	e := echo.New()
	e.HideBanner, e.HidePort = true, true
	s := &Server{o: o, echo: e, listener: l}
	e.HTTPErrorHandler = s.handleError
	if o.Allow != nil {
		e.Use(s.allow)
	}
	if o.BodyTime > 0 {
		e.Use(timeBodies(o.BodyTime))
	}
	s.adminRoutes()
	return s, nil
}

// Echo is where routes are added, before Serve.
func (s *Server) Echo() *echo.Echo { return s.echo }

// Addr is the address that the server listens at, with its real port.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Draining says whether Serve's context has ended.
func (s *Server) Draining() bool { return s.draining.Load() }

// Serve serves until ctx ends. Then it accepts no more, waits for the running requests up to the grace time, ends the
// contexts of those that are left with an *api.Error as cause, and returns nil. An error of the listener is returned at once.
func (s *Server) Serve(ctx context.Context) error {
	// Requests outlive ctx by the grace time, so they hang on a context of their own.
	base, cut := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cut(nil)
	count := &limit{max: int64(s.o.MaxConns)}
	others := newFed(s.listener.Addr())
	srv := &http.Server{
		Handler: s.echo, ReadHeaderTimeout: readHeaderTimeout, IdleTimeout: idleTimeout, MaxHeaderBytes: maxHeaderBytes,
		BaseContext: func(net.Listener) context.Context { return base },
		ConnState:   count.state,
		ErrorLog:    slog.NewLogLogger(s.o.Logger.Handler(), slog.LevelDebug),
	}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(others) }() // ends with Shutdown
	serve, fast := others.give, (*h1.Server)(nil)
	if s.o.TLS == nil {
		fast = h1.New(base, h1.Options{
			Handler: s.echo, Other: func(c net.Conn) { others.give(&bounded{Conn: c}) }, Closed: count.closed, HeaderTime: readHeaderTimeout, IdleTime: idleTimeout, MaxHead: maxHeaderBytes,
			Logger: s.o.Logger,
		})
		serve = fast.Serve
	}
	accepting, stop := context.WithCancel(ctx)
	failed := make(chan error, 1)
	go func() { failed <- s.accept(accepting, count, serve) }()
	select {
	case err := <-failed:
		stop()
		return errors.Join(fmt.Errorf("serve at %s: %w", s.Addr(), err), srv.Close(), fast.Close())
	case <-ctx.Done():
	}
	s.draining.Store(true)
	stop()
	_ = s.listener.Close() // it accepts no more
	<-failed
	s.drain(base, cut, srv, fast)
	<-served
	return nil
}

func (s *Server) drain(base context.Context, cut context.CancelCauseFunc, srv *http.Server, fast *h1.Server) {
	defer func() { _ = errors.Join(srv.Close(), fast.Close()) }() // what is left has neither finished nor looked at its context
	within := func(limit time.Duration) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(base), limit)
		defer cancel()
		both := make(chan error, 1)
		go func() { both <- srv.Shutdown(ctx) }()
		return errors.Join(fast.Drain(ctx), <-both)
	}
	if within(s.o.Grace) == nil {
		return
	}
	s.o.Logger.Warn("grace time is over; ending requests that still run", "grace", s.o.Grace)
	cut(api.Unavailable("", time.Second, "the process that served this stops, and its grace time of %v is over", s.o.Grace))
	_ = within(hardStop)
}

// Close closes the listener of a server that is never served.
func (s *Server) Close() error { return s.listener.Close() }
