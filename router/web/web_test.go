package web

import (
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/labstack/echo/v4"
)

func TestThePageAndItsFiles(t *testing.T) {
	e := echo.New()
	if err := Routes(e); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/": "<title>Meridian", "/web/app.js": "'use strict'", "/web/style.css": "color-scheme",
	} {
		w := httptest.NewRecorder()
		e.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		if w.Code != 200 || !strings.Contains(w.Body.String(), want) {
			t.Errorf("%s: %d %.80s", path, w.Code, w.Body)
		}
		if path == "/" && !strings.Contains(w.Header().Get("Content-Security-Policy"), "script-src 'self'") {
			t.Errorf("policy %q", w.Header().Get("Content-Security-Policy"))
		}
	}
	w := httptest.NewRecorder()
	e.ServeHTTP(w, httptest.NewRequest("GET", "/web/../web.go", nil))
	if w.Code == 200 {
		t.Error("a file outside the page is served")
	}
}

func TestThePageWritesNoHTMLOfOthers(t *testing.T) {
	b, err := files.ReadFile("static/app.js")
	if err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"innerHTML", "insertAdjacentHTML", "document.write", "eval("} {
		if strings.Contains(string(b), bad) {
			t.Errorf("app.js uses %s: text of clients could run", bad)
		}
	}
}
