// Package openblas compares the matrix product of gpu/cpu with that of OpenBLAS. It holds only a benchmark, behind the
// build tag openblas, because it needs a C compiler and the library (Debian: libopenblas-dev), which nothing else does. It
// is a package of its own because cgo and Go assembly cannot share one.
//
//	CGO_ENABLED=1 go test -tags openblas -bench . ./bench/openblas
package openblas
