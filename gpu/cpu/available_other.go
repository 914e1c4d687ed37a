//go:build !amd64

package cpu

func available() []*kernels { return []*kernels{scalarKernels()} }
