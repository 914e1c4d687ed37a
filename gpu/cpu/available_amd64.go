package cpu

//go:generate go run ./asmgen

import "golang.org/x/sys/cpu"

// available lists what the processor and the operating system support. Every processor with AVX2 also converts halves
// (F16C), which has no flag of its own in package cpu.
func available() []*kernels {
	var all []*kernels
	if cpu.X86.HasAVX512F {
		all = append(all, avx512Kernels())
	}
	if cpu.X86.HasAVX2 && cpu.X86.HasFMA {
		all = append(all, avx2Kernels())
	}
	return append(all, scalarKernels())
}
