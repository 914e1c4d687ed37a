package collect

import (
	"fmt"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
	"meridian.internal/router/traces"
	"meridian.internal/shared/phase"
)

func TestRotatedFilesAreCompressedAndEveryRequestIsStillFound(t *testing.T) {
	dir := t.TempDir()
	const requests = 200
	synctest.Test(t, func(t *testing.T) {
		c, stop := start(t, Options{Dir: dir, MaxBytes: 64 << 10, Compress: true, Recent: 1})
		for i := range requests {
			for _, role := range []phase.Role{phase.Ctx, phase.Gen, phase.Disagg} {
				c.in <- message{rec: rec(role, fmt.Sprintf("r%03d", i))}
			}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		for i := range requests {
			for _, id := range []string{fmt.Sprintf("r%03d", i), fmt.Sprintf("client-r%03d", i)} {
				raw, ok := c.Find(id)
				if l, err := timeline.Parse(raw); !ok || err != nil || l.RequestID != fmt.Sprintf("r%03d", i) {
					t.Fatalf("%s: found %v, %v", id, ok, err)
				}
			}
		}
		stop()
	})
	packed, _ := filepath.Glob(filepath.Join(dir, "*.jsonl"+jsonl.Packed))
	all, _ := filepath.Glob(filepath.Join(dir, "timeline-*.jsonl*"))
	if len(packed) < 3 || len(all) != 2*(len(packed)+1) {
		t.Errorf("%d compressed files of %v, want all but the last, and an index each", len(packed), all)
	}
	s, err := traces.Open([]string{dir})
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	if err := s.Each(t.Context(), true, func(*timeline.Line, traces.Position) error { n++; return nil }); err != nil || n != requests {
		t.Errorf("%d lines are read, %v, want %d", n, err, requests)
	}
}
