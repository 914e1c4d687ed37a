//go:build !race

package ranks

// iterations of the long test.
const iterations = 10_000
