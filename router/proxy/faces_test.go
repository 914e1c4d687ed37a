package proxy

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"testing"

	"github.com/labstack/echo/v4"
)

// kept are lines by the id of a request.
type kept map[string]string

func (k kept) Recent(int) []json.RawMessage { return nil }

func (k kept) Await(_ context.Context, id string) (json.RawMessage, bool) {
	line, ok := k[id]
	return json.RawMessage(line), ok
}

// TestATimelineIsFoundHoweverItsIDIsWrittenInAPath: clients may name their requests with what a path has escaped.
func TestATimelineIsFoundHoweverItsIDIsWrittenInAPath(t *testing.T) {
	p, e := &Proxy{o: Options{Timelines: kept{"a/b:c+d=@": `{"found":1}`}}}, echo.New()
	p.Routes(e)
	for path, want := range map[string]string{
		"a/b:c+d=@": `{"found":1}`, "a%2Fb%3Ac%2Bd%3D%40": `{"found":1}`, "%61/b:c%2bd=@": `{"found":1}`, "a%2Fb": "", "a%25": "",
	} {
		res := httptest.NewRecorder()
		if e.ServeHTTP(res, httptest.NewRequest("GET", "/timelines/"+path, nil)); want != "" && res.Body.String() != want || want == "" && res.Code == 200 {
			t.Errorf("%s: %d %s, want %q", path, res.Code, res.Body, want)
		}
	}
}
