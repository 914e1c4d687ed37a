package ledger

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/rows"
)

// FuzzQuery asks for rows with whatever as cursor and limit: the answer is a page whose cursor does not run back, or an
// error that is the client's.
func FuzzQuery(f *testing.F) {
	for _, q := range [][2]string{{"", ""}, {"3", "2"}, {"-1", ""}, {"9223372036854775807", "9223372036854775807"}, {"1e3", "0"}, {"+5", " 1"}} {
		f.Add(q[0], q[1])
	}
	l := newLedger(f, Options{Keep: 5, Sink: rows.Sink{Interval: 1}})
	for range 8 {
		l.Put(new(rows.Row))
	}
	e := echo.New()
	f.Fuzz(func(t *testing.T, after, limit string) {
		target := "/iteration_stats?" + url.Values{"after": {after}, "limit": {limit}}.Encode()
		w := httptest.NewRecorder()
		err := l.iterationStats(e.NewContext(httptest.NewRequest(http.MethodGet, target, nil), w))
		if err != nil {
			var bad *api.Error
			if !errors.As(err, &bad) || bad.Status() != http.StatusBadRequest {
				t.Fatalf("after %q, limit %q: %v", after, limit, err)
			}
			return
		}
		var a answer
		if err := json.Unmarshal(w.Body.Bytes(), &a); err != nil {
			t.Fatal(err)
		}
		if want := w.Body.Len(); w.Header().Get("Content-Length") == "" || len(a.Rows) > 5 || a.Next < 0 || want == 0 {
			t.Fatalf("after %q, limit %q: %+v", after, limit, a)
		}
	})
}
