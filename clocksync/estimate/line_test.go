package estimate

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func TestNthIsWhatSortingGives(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		xs := make([]float64, 1+r.IntN(70))
		for i := range xs {
			xs[i] = float64(r.IntN(20)) // with equal ones
		}
		k := r.IntN(len(xs))
		sorted := slices.Sorted(slices.Values(xs))
		given := slices.Clone(xs)
		if got := nth(xs, k); got != sorted[k] {
			t.Fatalf("nth(%v, %d) = %v, want %v", given, k, got, sorted[k])
		}
	}
}
