//go:build race

package ranks

// iterations of the long test: under the race detector each costs twenty times as much.
const iterations = 1500
