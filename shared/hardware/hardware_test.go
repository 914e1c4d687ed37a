package hardware

import (
	"bytes"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"meridian.internal/shared/rows"
)

func TestThisProcessIsRead(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("process readings are of Linux")
	}
	n := New(Options{}).Newest()
	for name, v := range map[string]rows.Int{"RSS": n.RSS, "peak": n.PeakRSS, "threads": n.Threads, "files": n.OpenFiles, "heap": n.HeapBytes, "goroutines": n.GoRoutines} {
		if !v.OK || v.V <= 0 {
			t.Errorf("%s: %+v", name, v)
		}
	}
	for name, v := range map[string]rows.Int{"pinned": n.Pinned, "received": n.NetRead, "sent": n.NetWritten, "collections": n.GCCycles} {
		if !v.OK || v.V < 0 {
			t.Errorf("%s: %+v", name, v)
		}
	}
	if !n.CPU.OK || n.CPU.V <= 0 || n.PeakRSS.V < n.RSS.V || n.RSS.V > 1<<40 {
		t.Errorf("%+v", n)
	}
}

func TestAGPUThatIsNotThereIsAskedForOnce(t *testing.T) {
	asked := 0
	var log bytes.Buffer
	s := New(Options{Logger: slog.New(slog.NewTextHandler(&log, nil)), GPUs: func() ([]rows.GPU, error) {
		asked++
		return nil, errors.New("no driver")
	}})
	s.read()
	s.read()
	if asked != 1 || strings.Count(log.String(), "\n") != 1 {
		t.Errorf("asked %d times; log: %s", asked, log.String())
	}
	if m := s.Memory([]int{0}); m.GPU.OK || !m.CPU.OK {
		t.Errorf("memory of no GPU is %+v", m.GPU)
	}
}

func TestALibraryThatIsNotThereIsOpenedOnce(t *testing.T) {
	opened := 0
	var log bytes.Buffer
	s := New(Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	s.Watch(func() (func() ([]rows.GPU, error), error) { opened++; return nil, errors.New("no library") })
	s.read()
	s.read()
	if opened != 1 || strings.Count(log.String(), "\n") != 1 || !strings.Contains(log.String(), "no library") {
		t.Errorf("opened %d times; log: %s", opened, log.String())
	}
	if _, ok := s.Energy([]int{0}); ok {
		t.Error("the energy of no GPU is known")
	}
}

func TestEnergyIsThatOfTheCardsThatAreAskedFor(t *testing.T) {
	joules := func(v float64) rows.GPU { return rows.GPU{Energy: rows.Ratio{V: v, OK: true}} }
	s := New(Options{GPUs: func() ([]rows.GPU, error) { return []rows.GPU{joules(3), joules(4), {}}, nil }})
	for _, c := range []struct {
		cards []int
		want  float64 // 0: unknown
	}{{nil, 0}, {[]int{0}, 3}, {[]int{1, 0}, 7}, {[]int{0, 2}, 0}, {[]int{3}, 0}} {
		if got, ok := s.Energy(c.cards); got != c.want && ok || ok != (c.want > 0) {
			t.Errorf("cards %v have used %v J, known %t; want %v", c.cards, got, ok, c.want)
		}
	}
}

func TestMetricsSayWhatIsKnownAndAreClean(t *testing.T) {
	s := New(Options{GPUs: func() ([]rows.GPU, error) {
		return []rows.GPU{{Index: 0, Power: rows.Ratio{V: 410, OK: true}}, {Index: 1, MemoryUsed: rows.Some(5)}, {Index: 2, MemoryUsed: rows.Some(7)}}, nil
	}})
	reg := prometheus.NewRegistry()
	if err := s.Register(reg); err != nil {
		t.Fatal(err)
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]int{}
	for _, f := range families {
		seen[f.GetName()] = len(f.GetMetric())
	}
	if seen["meridian_gpu_power_watts"] != 1 || seen["meridian_gpu_memory_used_bytes"] != 2 || seen["meridian_gpu_temperature_celsius"] != 0 || seen["meridian_hardware_threads"] != 1 {
		t.Errorf("series by name: %v", seen)
	}
	if problems, err := promlint.NewWithMetricFamilies(families).Lint(); err != nil || len(problems) > 0 {
		t.Errorf("%v %+v", err, problems)
	}
	for _, c := range []struct {
		cards []int
		want  rows.Int
	}{{nil, rows.Int{}}, {[]int{0}, rows.Int{}}, {[]int{2}, rows.Some(7)}, {[]int{0, 1, 2}, rows.Some(12)}, {[]int{3}, rows.Int{}}} {
		if m := s.Memory(c.cards); m.GPU != c.want || !m.CPU.OK {
			t.Errorf("memory %+v of the GPUs %v, want %+v", m, c.cards, c.want)
		}
	}
}

// BenchmarkRead is a reading of the hardware, and what the one a second costs each of 500 steps.
func BenchmarkRead(b *testing.B) {
	s := New(Options{})
	b.ReportAllocs()
	for b.Loop() {
		s.read()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/500, "ns/step")
}
