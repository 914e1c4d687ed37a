package export

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"meridian.internal/router/timeline"
)

// receiver takes OTLP over HTTP and passes on every span; the first refuse posts are answered "not now".
type receiver struct {
	refuse int
	spans  chan otlpSpan
	bad    chan string
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	b, err := io.ReadAll(req.Body)
	if err != nil || !json.Valid(b) || req.URL.Path != "/v1/traces" || req.Header.Get("Content-Type") != "application/json" {
		r.bad <- fmt.Sprintf("%s %s: %v", req.URL, req.Header.Get("Content-Type"), err)
	}
	if r.refuse > 0 { // one sender: its posts come one after the other
		r.refuse--
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	list, err := decodeSpans(b)
	if err != nil {
		r.bad <- err.Error()
	}
	for _, s := range list {
		r.spans <- s
	}
}

func value(t *testing.T, c prometheus.Metric) int {
	t.Helper()
	var m dto.Metric
	if err := c.Write(&m); err != nil {
		t.Fatal(err)
	}
	return int(m.GetCounter().GetValue())
}

func TestLiveSpansArriveAsInTheFile(t *testing.T) {
	r := &receiver{refuse: 2, spans: make(chan otlpSpan, 100), bad: make(chan string, 100)}
	server := httptest.NewServer(r)
	defer server.Close()
	v, err := NewLive(server.URL, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	var lines []*timeline.Line
	for i := range 3 {
		l := vector()
		l.RequestID, l.Traceparent = fmt.Sprintf("req-%d", i), "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
		lines = append(lines, l)
		v.Add(l)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- v.Run(ctx) }()
	want := otlpSpans(t, export(t, "otlp", lines...))
	var got []otlpSpan
	for len(got) < len(want) {
		select {
		case s := <-r.spans:
			got = append(got, s)
		case b := <-r.bad:
			t.Fatal(b)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if !slices.Equal(got, want) {
		t.Errorf("received %+v\nwant %+v", got, want)
	}
	if s, d, again := value(t, v.sent), value(t, v.dropped), value(t, v.retries); s != 3 || d != 0 || again != 2 {
		t.Errorf("%d sent, %d dropped, %d retries; want 3, 0, 2", s, d, again)
	}
}

// answering answers every post with a status, without a network.
type answering int

func (s answering) RoundTrip(*http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: int(s), Status: http.StatusText(int(s)), Body: http.NoBody}, nil
}

func TestACollectorThatTakesNothingCostsABoundedQueueAndIsCounted(t *testing.T) {
	for _, c := range []struct {
		name    string
		status  answering
		retries bool
	}{{"not now", http.StatusServiceUnavailable, true}, {"never", http.StatusBadRequest, false}} {
		synctest.Test(t, func(t *testing.T) {
			v, err := NewLive("http://collector:4318", slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			v.client.Transport = c.status
			for range liveQueue + 10 {
				v.Add(vector())
			}
			if d := value(t, v.dropped); d != 10 {
				t.Errorf("%s: %d dropped by a full queue, want 10", c.name, d)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 2*liveGiveUp*liveQueue/liveBatch)
			defer cancel()
			v.Run(ctx)
			if d, s, again := value(t, v.dropped), value(t, v.sent), value(t, v.retries); d != liveQueue+10 || s != 0 || (again > 0) != c.retries {
				t.Errorf("%s: %d dropped, %d sent, %d retries; want %d, 0 and retries %v", c.name, d, s, again, liveQueue+10, c.retries)
			}
		})
	}
}

func TestAnEndpointThatIsNoURLIsNamed(t *testing.T) {
	for _, u := range []string{"", "collector:4318", "ftp://x", "http://"} {
		if _, err := NewLive(u, nil); err == nil {
			t.Errorf("%q is taken", u)
		}
	}
}
