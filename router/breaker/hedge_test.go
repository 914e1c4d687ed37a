package breaker

import (
	"testing"
	"time"
)

func TestAHedgeWaitsForTheQuantileOfItsSize(t *testing.T) {
	h := NewHedge(0.9)
	for i := range hedgeLeast - 1 {
		h.Observe(100, int64(i))
	}
	if d, ok := h.After(100); ok {
		t.Errorf("%d prefills gave %v, want nothing yet", hedgeLeast-1, d)
	}
	for i := range 200 { // the window forgets what was first
		h.Observe(100, int64(i%10+1)*int64(time.Millisecond))
		h.Observe(1000, int64(time.Second))
	}
	if d, ok := h.After(127); !ok || d < 9*time.Millisecond || d > 10*time.Millisecond {
		t.Errorf("90%% of 1 to 10 ms is %v, %v", d, ok)
	}
	if d, ok := h.After(600); !ok || d != time.Second {
		t.Errorf("another size: %v, %v", d, ok)
	}
	if _, ok := h.After(5); ok {
		t.Error("a size that was never seen has a quantile")
	}
}

func TestHedgesAreAFewPercentOfTheRequests(t *testing.T) {
	h, taken := NewHedge(0.5), 0
	for range 10_000 {
		h.Request()
		if h.Take() {
			taken++
		}
	}
	if taken < 490 || taken > 510 {
		t.Errorf("%d of 10,000 requests were hedged, want 5%%", taken)
	}
	for range 1000 {
		h.Request()
	}
	for taken = 0; h.Take(); taken++ {
	}
	if taken != hedgeMost {
		t.Errorf("%d hedges in a row, want %v at most", taken, hedgeMost)
	}
}
