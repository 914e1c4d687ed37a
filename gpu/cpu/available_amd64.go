package cpu

func available() []*kernels { return []*kernels{scalarKernels()} }
