//go:build cuda

package cuda

import (
	"fmt"
	"unsafe"
)

// grid is the shape of a launch; shared is dynamic shared memory in bytes, cluster how many blocks along x share theirs (0: none do), and maps
// how many of the launcher's maps come before the other arguments.
type grid struct{ x, y, z, threads, shared, cluster, maps int }

// launcher launches kernels of one module on one stream. Its first error sticks: a caller looks once, at the end.
type launcher struct {
	*stream
	kernels  *kernels
	args     [16]uint64
	pointers [16]unsafe.Pointer
	maps     tensorMaps
	config   launchConfig
	asked    [2]launchAttribute
	overlap  bool // kernels may begin to come while the one before ends
	err      error
}

func newLauncher(s *stream, k *kernels) *launcher {
	return &launcher{stream: s, kernels: k}
}

// launchConfig is CUlaunchConfig.
type launchConfig struct {
	gridX, gridY, gridZ, blockX, blockY, blockZ, shared uint32
	stream                                              uintptr
	attributes                                          *launchAttribute
	count                                               uint32
}

// launchAttribute is CUlaunchAttribute.
type launchAttribute struct {
	id    uint32
	value [17]uint32 // behind 4 bytes of padding
}

// serialization lets a kernel's blocks come before the kernel before has ended; the kernel itself waits for that one.
var serialization = launchAttribute{id: 6, value: [17]uint32{1: 1}}

// clusterOf makes so many blocks along x a cluster.
func clusterOf(blocks int) launchAttribute {
	return launchAttribute{id: 4, value: [17]uint32{1: uint32(blocks), 2: 1, 3: 1}}
}

// launch queues a kernel. An argument that is narrower than 64 bits stands in the low bits.
func (l *launcher) launch(name string, g grid, args ...uint64) {
	if l.err != nil {
		return
	}
	copy(l.args[:], args)
	for i := range g.maps {
		l.pointers[i] = unsafe.Pointer(l.maps.at(i))
	}
	for i := range args {
		l.pointers[g.maps+i] = unsafe.Pointer(&l.args[i])
	}
	l.config = launchConfig{
		gridX: uint32(max(g.x, 1)), gridY: uint32(max(g.y, 1)), gridZ: uint32(max(g.z, 1)), blockX: uint32(g.threads), blockY: 1, blockZ: 1,
		shared: uint32(g.shared), stream: l.handle, attributes: &l.asked[0],
	}
	if l.overlap {
		l.asked[l.config.count] = serialization
		l.config.count++
	}
	if g.cluster > 0 {
		l.asked[l.config.count] = clusterOf(g.cluster)
		l.config.count++
	}
	err := l.do("cuLaunchKernelEx", uintptr(unsafe.Pointer(&l.config)), l.kernels.calls[name], uintptr(unsafe.Pointer(&l.pointers[0])), 0)
	if err != nil {
		l.err = fmt.Errorf("kernel %s: %w", name, err)
	}
}

// keep remembers the first error.
func (l *launcher) keep(err error) {
	if l.err == nil {
		l.err = err
	}
}

// taken returns the sticking error and forgets it.
func (l *launcher) taken() error {
	err := l.err
	l.err = nil
	return err
}

func number(i int) uint64 { return uint64(uint32(int32(i))) }

func flag(b bool) uint64 {
	if b {
		return 1
	}
	return 0
}
