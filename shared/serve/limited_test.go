package serve

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

func TestASourceCausesALineAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		r := prometheus.NewRegistry()
		log, err := Limited(slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo})).With("node", "n"), r, "lines_total")
		if err != nil {
			t.Fatal(err)
		}
		said := func(what string, want ...string) {
			t.Helper()
			got := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
			out.Reset()
			for i, w := range want {
				if i >= len(got) || !strings.HasSuffix(got[i], w) {
					t.Errorf("%s: lines %q, want %q", what, got, want)
					return
				}
			}
			if len(got) != max(len(want), 1) || len(want) == 0 && got[0] != "" {
				t.Errorf("%s: lines %q, want %q", what, got, want)
			}
		}
		for range 1000 {
			log.Warn("bad message", "subject", "a", "error", "x")
		}
		said("one source", "msg=\"bad message\" node=n subject=a error=x")
		log.Warn("bad message", "subject", "b")
		log.Warn("other message", "subject", "a")
		log.Debug("bad message", "subject", "c")
		said("other sources, and another message", "subject=b", "msg=\"other message\" node=n subject=a")
		time.Sleep(59 * time.Second)
		log.Warn("bad message", "subject", "a")
		said("within a minute")
		time.Sleep(time.Second)
		log.With("x", 1).WithGroup("g").Warn("bad message", "subject", "a")
		said("after a minute", "x=1 g.subject=a g.left_out=1000")
		log.Warn("bad message", "subject", "a")
		said("the next minute")
		time.Sleep(time.Minute)
		for i := range 10 * limitedSources {
			log.Warn("bad message", "subject", fmt.Sprint(i))
		}
		many := strings.Count(out.String(), "\n")
		if many < 100 || many > limitedSources+1 {
			t.Errorf("%d lines of ten times as many sources, want %d at most", many, limitedSources+1)
		}
		out.Reset()
		time.Sleep(time.Minute)
		log.Warn("bad message", "subject", "d")
		said("old sources are forgotten", "subject=d")
		families, err := r.Gather()
		if err != nil || len(families) != 1 {
			t.Fatalf("%v, %v", families, err)
		}
		counted := map[string]float64{}
		for _, m := range families[0].Metric {
			counted[m.Label[0].GetValue()+" "+m.Label[1].GetValue()] = m.Counter.GetValue()
		}
		want := map[string]float64{"bad message false": float64(999 + 1 + 1 + 10*limitedSources - many), "bad message true": float64(1 + 1 + 1 + many + 1), "other message true": 1}
		if !maps.Equal(counted, want) {
			t.Errorf("counted are %v, want %v", counted, want)
		}
	})
}
