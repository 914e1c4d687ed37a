package ranks

import (
	"slices"
	"testing"

	"meridian.internal/gpu/engine"
	"meridian.internal/shared/rows"
)

func TestACardIsPaidByTheTokensOfItsRanks(t *testing.T) {
	joules, known := 700.0, true
	o := Options{Cards: [][]int{{0}, {0, 1}, {1}, {2}}, Sink: rows.Sink{Energy: func(cards []int) (float64, bool) { return joules, known }}}
	bills := o.bills(false)
	b := bills[0]
	if len(bills) != 2 || b == nil || bills[1] == nil {
		t.Fatalf("bills of the cards %v, want of 0 and 1", bills)
	}
	step := func(name string, used float64, tokens [2]int, want ...float64) {
		t.Helper()
		for rank, n := range tokens {
			b.ran(rank, n)
		}
		joules += used
		got := []float64{}
		for rank := range want {
			j, ok := b.of(rank)
			if !ok {
				t.Errorf("%s: nothing is known of rank %d", name, rank)
			}
			got = append(got, j)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: ranks have used %v J, want %v", name, got, want)
		}
	}
	step("the first reading", 5, [2]int{8, 8}, 0, 0)
	step("the counter stands still", 0, [2]int{22, 2}, 0, 0)
	step("it moves", 8, [2]int{0, 0}, 6, 2)
	step("nothing ran", 100, [2]int{0, 0}, 6, 2)
	step("one ran", 10, [2]int{0, 3}, 6, 12)
	step("it began anew", -500, [2]int{0, 0}, 6, 12)
	step("and goes on", 1, [2]int{5, 0}, 7, 12)
	for rank, want := range []bool{false, false, false, true} { // processes: only what no other uses can be told
		cfg := engine.Config{Energy: func() (float64, bool) { return 1, true }}
		o.share(&cfg, rank, o.bills(true))
		if _, ok := cfg.Energy(); ok != want {
			t.Errorf("the energy of rank %d, a process, is known: %t, want %t", rank, ok, want)
		}
	}
	known = false
	if j, ok := b.of(0); ok {
		t.Errorf("%v J of a card that tells nothing", j)
	}
}
