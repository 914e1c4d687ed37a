// Package web owns the router's page for people: nodes with their load and clocks, what they keep of KV, where time
// goes, the newest requests, and one of them in depth. It serves fixed files and one stream of events (live.go); a whole request comes from /timelines/{id}.
package web

import (
	"embed"
	"io/fs"
	"net/http"

	"github.com/labstack/echo/v4"
)

//go:embed static
var files embed.FS // read only

// policy lets the page load its own files and nothing else: what clients wrote into a request can never run.
const policy = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// Options of the page. All are needed.
type Options struct {
	Feed     *Feed
	KV       *KV
	Cluster  func() any  // what GET /cluster answers
	Draining func() bool // streams end then
}

// Routes adds /, /web/* and /live.
func Routes(e *echo.Echo, o Options) error {
	static, err := fs.Sub(files, "static")
	if err != nil {
		return err
	}
	serve := http.FileServerFS(static)
	handler := func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-cache")
		serve.ServeHTTP(w, r)
	}
	e.GET("/", echo.WrapHandler(http.HandlerFunc(handler)))
	e.GET("/web/*", echo.WrapHandler(http.StripPrefix("/web", http.HandlerFunc(handler))))
	l := &live{feed: o.Feed, kv: o.KV, cluster: o.Cluster, draining: o.Draining}
	e.GET("/live", l.serve)
	return nil
}
