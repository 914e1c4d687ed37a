package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
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
			bad := err.(*api.Error)
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
