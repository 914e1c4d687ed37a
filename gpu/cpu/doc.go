// Package cpu is the back end that runs a model on the processor, in float32. It owns the arithmetic, the KV memory and
// the threads that share the work. It does not schedule, does not own block tables and does not choose tokens
// (gpu/sample does).
//
// # Arithmetic
//
// The result of a row does not depend on the other rows of the step, on chunk borders, on the number of threads or on
// the kernel chosen. That needs one definition of every sum, which all kernels follow to the bit:
//
//   - A dot product over k is 16 float32 lanes. Lane l sums the elements k = l (mod 16) in rising order by fused
//     multiply-add, beginning at +0. The lanes are then added as a tree: l and l+8, then l and l+4, l+2, l+1. One
//     register of AVX-512, two of AVX2 or 16 variables hold the lanes. Weights are widened to float32 first, exactly.
//   - Rows whose length is not a multiple of 16 are padded with zeros.
//   - Attention takes two passes: all scores of a query, their largest, then exponentials, their sum (16 lanes by
//     distance from the first visible position, the same tree), and values weighted in order of position, one
//     fused multiply-add each. No running rescale, so no trace of where a chunk or a block began.
//   - The exponential is one polynomial, with the same operations in the same order everywhere.
//   - All else is element by element; where Go may fuse a multiplication into an addition, a conversion forbids it.
//
// # Ownership
//
// One goroutine, the device, runs steps in order and owns slots, activations and the sampling state. Workers run parts
// of one step between two of its lines and own nothing. Two more goroutines copy KV out and in; the caller keeps their
// regions apart from the steps, as backend.Backend says.
package cpu
