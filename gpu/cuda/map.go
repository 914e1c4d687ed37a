//go:build cuda

package cuda

import (
	"fmt"
	"unsafe"
)

// tensorMap is CUtensorMap: what the copy engine of sm_90 knows of a matrix in the card's memory. Its address is a multiple of 64.
type tensorMap [16]uint64

const mostMaps = 2 // that a kernel takes

// tensorMaps has room for the maps of a launch, wherever it lies.
type tensorMaps [mostMaps*len(tensorMap{}) + 7]uint64

func (m *tensorMaps) at(i int) *tensorMap {
	const align = 64
	first := -uintptr(unsafe.Pointer(m)) % align / unsafe.Sizeof(m[0])
	return (*tensorMap)(unsafe.Pointer(&m[first+uintptr(i*len(tensorMap{}))]))
}

// extent is one dimension of a matrix of bfloat16: its size, how many of it are copied at a time, and how many elements lie between neighbours.
type extent struct{ size, box, stride int }

// describe makes map i of the next launch: the matrix at an address by its dimensions, those that lie side by side first. A box comes with rows of 128 bytes,
// which are swizzled.
func (l *launcher) describe(i int, at address, dims ...extent) {
	if l.err != nil {
		return
	}
	var sizes, strides [3]uint64
	var box, steps [3]uint32
	for i, d := range dims {
		sizes[i], box[i], steps[i] = uint64(d.size), uint32(d.box), 1
		if i > 0 {
			strides[i-1] = 2 * uint64(d.stride)
		}
	}
	const bf16, plain, swizzle128, promote256, zeros = 9, 0, 3, 3, 0
	err := l.do("cuTensorMapEncodeTiled", uintptr(unsafe.Pointer(l.maps.at(i))), bf16, uintptr(len(dims)), uintptr(at), uintptr(unsafe.Pointer(&sizes[0])),
		uintptr(unsafe.Pointer(&strides[0])), uintptr(unsafe.Pointer(&box[0])), uintptr(unsafe.Pointer(&steps[0])), plain, swizzle128, promote256, zeros)
	if err != nil {
		l.err = fmt.Errorf("map of a matrix of %v: %w", dims, err)
	}
}

// describeRows makes map i of a matrix of rows of k elements, of which a box has 64 of some rows.
func (l *launcher) describeRows(i int, at address, rows, k, box int) {
	l.describe(i, at, extent{size: k, box: 64}, extent{size: rows, box: box, stride: k})
}
