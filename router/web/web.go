// Package web owns the router's page for people: the nodes with their load and clocks, and the newest requests as bars. It
// serves fixed files; what they show comes from /cluster and /timelines.
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

// Routes adds / and /web/*.
func Routes(e *echo.Echo) error {
	static, err := fs.Sub(files, "static")
	if err != nil {
		return err
	}
	serve := http.FileServerFS(static)
	handler := func(c echo.Context) error {
		h := c.Response().Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-cache")
		serve.ServeHTTP(c.Response(), c.Request())
		return nil
	}
	e.GET("/", handler)
	e.GET("/web/*", echo.WrapHandler(http.StripPrefix("/web", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-cache")
		serve.ServeHTTP(w, r)
	}))))
	return nil
}
