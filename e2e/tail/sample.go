package tail

import (
	"encoding/json"
	"math"
	"slices"
	"time"
)

// Sample holds every duration, so that its quantiles are exact.
type Sample struct{ values []time.Duration }

func (s *Sample) add(d time.Duration) { s.values = append(s.values, d) }

// Quantile is the nearest-rank quantile; 0 without values.
func (s *Sample) Quantile(q float64) time.Duration {
	if len(s.values) == 0 {
		return 0
	}
	slices.Sort(s.values)
	rank := int(math.Ceil(q*float64(len(s.values)))) - 1
	return s.values[min(max(rank, 0), len(s.values)-1)]
}

// MarshalJSON writes quantiles in ns; null without values.
func (s Sample) MarshalJSON() ([]byte, error) {
	if len(s.values) == 0 {
		return []byte("null"), nil
	}
	return json.Marshal(struct {
		N    int   `json:"count"`
		P50  int64 `json:"p50_ns"`
		P99  int64 `json:"p99_ns"`
		P999 int64 `json:"p999_ns"`
		Max  int64 `json:"max_ns"`
	}{len(s.values), s.Quantile(0.5).Nanoseconds(), s.Quantile(0.99).Nanoseconds(), s.Quantile(0.999).Nanoseconds(), s.Quantile(1).Nanoseconds()})
}

// Join gives one window of the same kind from several rounds.
func Join(all []Window) Window {
	w := Window{Mode: all[0].Mode, Streams: all[0].Streams, LongRate: all[0].LongRate}
	for _, o := range all {
		w.Time += o.Time
		w.Failed += o.Failed
		w.Shed += o.Shed
		w.ITL.values = append(w.ITL.values, o.ITL.values...)
		w.TTFT.values = append(w.TTFT.values, o.TTFT.values...)
		w.LongTTFT.values = append(w.LongTTFT.values, o.LongTTFT.values...)
		w.ended = append(w.ended, o.ended...)
	}
	return w
}
