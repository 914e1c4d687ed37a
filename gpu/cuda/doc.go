// Package cuda is the back end that runs a model on an NVIDIA card. It owns the driver binding, the kernels, the device
// memory and the streams; it does not schedule and does not own block tables. Its code stands behind the build tag cuda:
// it opens libcuda, libnvrtc and libcublasLt when it runs, so that building it needs neither a card nor a toolkit.
//
// # Numerics
//
// The normal mode keeps weights, activations and KV in bfloat16, the residual stream and every sum in float32; products
// go to cuBLASLt. The deterministic mode keeps all in float32 and uses kernels of its own whose sums have one order,
// so that a row's result does not depend on the other rows of the step or on chunk borders.
//
// # Ownership
//
// One goroutine, the launcher, owns the compute stream, slots and activations; it queues a step and does not wait. A
// second one, the finisher, waits for the steps in order and publishes them. Two more copy KV out and in, one copies out of
// other processes' KV, and one asks the card's clock, each on a stream of its own. Each is locked to its thread, because a CUDA context is bound to one. Sampled tokens stay on the card, where
// the next step finds them.
package cuda
