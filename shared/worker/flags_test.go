package worker

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

func TestWhatOthersDialFollowsFromListenAndAdvertise(t *testing.T) {
	for _, c := range []struct{ name, advertise, listening, http, host string }{
		{"a plain address is advertised as it is", "", "127.0.0.1:8101", "127.0.0.1:8101", "127.0.0.1"},
		{"a host alone gets the port", "ctx0", "[::]:8101", "ctx0:8101", "ctx0"},
		{"a host with a port wins", "ctx0:9", "[::]:8101", "ctx0:9", "ctx0"},
		{"a URL is taken for its host", "http://ctx0:9", "0.0.0.0:8101", "ctx0:9", "ctx0"},
		{"an IPv6 address", "[2001:db8::1]", "[::]:8101", "[2001:db8::1]:8101", "2001:db8::1"},
	} {
		h, err := advertised(c.advertise, c.listening)
		if err != nil || h.http != c.http || h.host != c.host {
			t.Errorf("%s: %+v, %v", c.name, h, err)
		}
	}
	if h, err := advertised("", "[::]:8101"); err != nil || h.host == "" || h.host == "::" {
		t.Errorf("every address is advertised as %+v, %v", h, err)
	}
	if _, err := advertised("a/b", "127.0.0.1:1"); err == nil || !strings.Contains(err.Error(), "--advertise") {
		t.Errorf("got %v", err)
	}
}

func TestFlagsAreRefusedByName(t *testing.T) {
	for _, c := range []struct {
		want string
		f    Flags
	}{
		{"--grace", Flags{LedgerFlags: LedgerFlags{IterStatsMax: 1}, Grace: 2 * time.Hour}},
		{"--kv-stats-interval 3: must be a multiple of --iter-stats-interval, 2", Flags{LedgerFlags: LedgerFlags{IterStatsMax: 1, IterStatsInterval: 2, KVStatsInterval: 3}}},
		{"--max-step-records", Flags{LedgerFlags: LedgerFlags{IterStatsMax: 1, MaxStepRecords: -1}}},
		{"--iter-stats-interval", Flags{LedgerFlags: LedgerFlags{IterStatsMax: 1, IterStatsInterval: -1}}},
		{"--iter-stats-max", Flags{}},
		{"--name", Flags{LedgerFlags: LedgerFlags{IterStatsMax: 1}, Name: strings.Repeat("x", 200)}},
		{"--nats", Flags{LedgerFlags: LedgerFlags{IterStatsMax: 1}, NATS: "nats://a:1,b"}},
	} {
		if err := c.f.Validate(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}
	ok := Flags{LedgerFlags: LedgerFlags{IterStatsMax: 1}, Name: "ctx0", NATS: "nats://a:1,nats://b:2"}
	if err := ok.Validate(); err != nil {
		t.Error(err)
	}
}

func TestErrorsOfTheEngineHaveAStatus(t *testing.T) {
	for kind, want := range map[string]int{
		"busy": 503, "draining": 503, "stopped": 503, "too_long": 400, "invalid": 400, "deadline": 504, "cancelled": statusClientGone, "no_token": 500,
	} {
		e := explainKind(kind, "ctx", "text")
		if e == nil || e.Status() != want || e.Message != "text" || e.Stage == "" {
			t.Errorf("%s: %+v, want %d", kind, e, want)
			continue
		}
		if (want == http.StatusServiceUnavailable) != (e.RetryAfter > 0) || (want == http.StatusServiceUnavailable) != e.Retryable {
			t.Errorf("%s: retry after %s, retryable %v", kind, e.RetryAfter, e.Retryable)
		}
	}
	if e := explainKind("", "ctx", "text"); e != nil {
		t.Errorf("an unknown error is %+v", e)
	}
}
