package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/api"
	"meridian.internal/shared/rows"
)

type fakeProfiler struct {
	err   error
	files []string
	asked rows.ProfileRequest
}

func (f *fakeProfiler) StartProfile(_ context.Context, r rows.ProfileRequest) (rows.ProfileWindow, error) {
	f.asked = r
	return rows.ProfileWindow{StartIter: 8, Files: []string{"a.json"}}, f.err
}

func (f *fakeProfiler) StopProfile(context.Context) (rows.ProfileWindow, error) {
	return rows.ProfileWindow{StartIter: 8, Files: f.files}, f.err
}

func TestProfilesAreStartedAndStoppedOverHTTP(t *testing.T) {
	for _, tt := range []struct {
		name, path, body string
		p                fakeProfiler
		status           int
		want             string
	}{
		{"a start", "/start_profile", `{"num_steps":4,"activities":["CPU"]}`, fakeProfiler{}, 200, `"status":"scheduled","start_iter":8,"stop_iter":null`},
		{"a start without a body", "/start_profile", "", fakeProfiler{}, 200, `"a.json"`},
		{"a misspelt field", "/start_profile", `{"steps":4}`, fakeProfiler{}, 400, `steps`},
		{"a wrong type", "/start_profile", `{"num_steps":"4"}`, fakeProfiler{}, 400, `num_steps`},
		{"two objects", "/start_profile", `{"num_steps":4}{}`, fakeProfiler{}, 400, "follows"},
		{"an object and more", "/start_profile", `{"num_steps":4} steps`, fakeProfiler{}, 400, "after the object"},
		{"too much", "/start_profile", strings.Repeat(" ", maxProfileBody+1) + "{}", fakeProfiler{}, 400, "too large"},
		{"what cannot be", "/start_profile", `{}`, fakeProfiler{err: fmt.Errorf("%w: x", rows.ErrProfileInvalid)}, 400, "x"},
		{"a second start", "/start_profile", `{}`, fakeProfiler{err: fmt.Errorf("%w: iterations 3 to 6", rows.ErrProfileBusy)}, 409, "iterations 3 to 6"},
		{"an engine that has ended", "/start_profile", `{}`, fakeProfiler{err: context.Canceled}, 503, "canceled"},
		{"a stop", "/stop_profile", "", fakeProfiler{files: []string{"b.json"}}, 200, `"b.json"`},
		{"a stop before the first iteration", "/stop_profile", "", fakeProfiler{}, 200, `"cancelled"`},
		{"a stop of nothing", "/stop_profile", "", fakeProfiler{err: rows.ErrProfileNone}, 409, "no window"},
	} {
		n := &Node{o: Options{Profiler: &tt.p}}
		e := echo.New()
		e.HTTPErrorHandler = func(err error, c echo.Context) {
			var bad *api.Error
			if !errors.As(err, &bad) {
				t.Errorf("error %v, want one of the interface", err)
				return
			}
			_ = c.JSONBlob(bad.Status(), bad.Append(nil))
		}
		e.POST("/start_profile", n.startProfile)
		e.POST("/stop_profile", n.stopProfile)
		w := httptest.NewRecorder()
		e.ServeHTTP(w, httptest.NewRequest(http.MethodPost, tt.path, strings.NewReader(tt.body)))
		if w.Code != tt.status || !strings.Contains(w.Body.String(), tt.want) || !json.Valid(w.Body.Bytes()) {
			t.Errorf("%s: %d %s", tt.name, w.Code, w.Body)
		}
		if tt.name == "a start" && (tt.p.asked.NumSteps == nil || *tt.p.asked.NumSteps != 4 || tt.p.asked.Activities[0] != "CPU") {
			t.Errorf("asked %+v", tt.p.asked)
		}
	}
}

// FuzzParseProfile: no body is read in part, and what is read is read again from what it is written as.
func FuzzParseProfile(f *testing.F) {
	f.Add(`{"output_dir":"/tmp","num_steps":4,"start_step":1,"activities":["CPU","GPU"]}`)
	f.Add("")
	f.Add(`{} {}`)
	f.Add(`{"num_steps":1e30}`)
	f.Fuzz(func(t *testing.T, body string) {
		r, err := parseProfile(strings.NewReader(body))
		if err != nil {
			if !reflect.DeepEqual(r, rows.ProfileRequest{}) {
				t.Fatalf("%q: %+v and %v", body, r, err)
			}
			return
		}
		if rest := strings.TrimSpace(body); rest != "" && !json.Valid([]byte(rest)) {
			t.Fatalf("%q is not JSON and gave %+v", body, r)
		}
		again, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := parseProfile(bytes.NewReader(again)); err != nil || !reflect.DeepEqual(got, r) {
			t.Fatalf("%s gave %+v, %v, want %+v", again, got, err, r)
		}
	})
}
