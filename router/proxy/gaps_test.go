package proxy

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

func TestGapsCountAsAHistogramDoes(t *testing.T) {
	g := newGaps()
	want := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "x", Buckets: g.bounds})
	for _, read := range []struct {
		ns     int64
		tokens int
	}{{0, 0}, {0, 3}, {500_000, 1}, {500_001, 1}, {3_000_000, 5}, {1 << 40, 2}} {
		g.add(read.ns, read.tokens)
		for i := range read.tokens {
			if i > 0 {
				read.ns = 0
			}
			want.Observe(float64(read.ns) / 1e9)
		}
	}
	ch := make(chan prometheus.Metric, 1)
	g.Collect(ch)
	got, expected := written(t, <-ch), written(t, want)
	if got.GetSampleCount() != expected.GetSampleCount() || got.GetSampleSum() != expected.GetSampleSum() {
		t.Errorf("%d tokens, %v s; want %d, %v", got.GetSampleCount(), got.GetSampleSum(), expected.GetSampleCount(), expected.GetSampleSum())
	}
	for i, b := range expected.GetBucket() {
		if o := got.GetBucket()[i]; o.GetUpperBound() != b.GetUpperBound() || o.GetCumulativeCount() != b.GetCumulativeCount() {
			t.Errorf("bucket %v; want %v", o, b)
		}
	}
}

func written(t *testing.T, m prometheus.Metric) *dto.Histogram {
	t.Helper()
	var out dto.Metric
	if err := m.Write(&out); err != nil {
		t.Fatal(err)
	}
	return out.GetHistogram()
}
