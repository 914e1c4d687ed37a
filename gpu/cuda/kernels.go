//go:build cuda

package cuda

import (
	_ "embed" // the kernels' source
	"fmt"
	"strings"
	"unsafe"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

var (
	//go:embed kernels/common.cuh
	commonSource string
	//go:embed kernels/layer.cu
	layerSource string
	//go:embed kernels/attention.cu
	attentionSource string
	//go:embed kernels/prefill.cu
	prefillSource string
	//go:embed kernels/sample.cu
	sampleSource string
)

// maxTop is how many log probabilities a token may carry.
const maxTop = 32

var kernelNames = []string{
	"stamp", "embed", "rmsNorm", "rope", "gated", "product", "moveKV", "copyBlocks", "attend", "prefill", "combine", "choose", "assign",
	"vector",
}

// kernels is the compiled module.
type kernels struct {
	module uintptr
	calls  map[string]uintptr
}

var compilerCalls = []string{
	"nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcGetProgramLogSize", "nvrtcGetProgramLog", "nvrtcGetCUBINSize",
	"nvrtcGetCUBIN", "nvrtcDestroyProgram", "nvrtcVersion",
}

// shape is the model's shape as the kernels' macros.
func shape(c *model.Config, info backend.Info) string {
	bf16 := 0
	if info.KVType == "bf16" {
		bf16 = 1
	}
	var b strings.Builder
	for _, m := range []struct {
		name  string
		value any
	}{
		{"BF16", bf16}, {"HIDDEN", c.Hidden}, {"HEADS", c.Heads}, {"KVHEADS", c.KVHeads}, {"HS", c.HeadSize},
		{"INTER", c.Intermediate}, {"VOCAB", c.Vocab}, {"BLOCK_TOKENS", info.TokensPerBlock},
		{"LAYERS", info.Stage.End - info.Stage.First}, {"EPS", c.NormEps}, {"MAXTOP", maxTop},
	} {
		fmt.Fprintf(&b, "#define %s %v\n", m.name, m.value)
	}
	return b.String()
}

// compile builds the kernels for the card and the model's shape.
func (c *context) compile(shape string) (*kernels, error) {
	l, err := openLibrary([]string{"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}, compilerCalls)
	if err != nil {
		return nil, err
	}
	binary, err := build(l, shape+commonSource+layerSource+attentionSource+prefillSource+sampleSource, fmt.Sprintf("--gpu-architecture=sm_%d", c.arch))
	if err != nil {
		return nil, err
	}
	k := &kernels{calls: map[string]uintptr{}}
	if err := c.do("cuModuleLoadData", uintptr(unsafe.Pointer(&k.module)), uintptr(unsafe.Pointer(&binary[0]))); err != nil {
		return nil, err
	}
	for _, name := range kernelNames {
		var f uintptr
		z := append([]byte(name), 0)
		if err := c.do("cuModuleGetFunction", uintptr(unsafe.Pointer(&f)), k.module, uintptr(unsafe.Pointer(&z[0]))); err != nil {
			return nil, fmt.Errorf("kernel %s: %w", name, err)
		}
		k.calls[name] = f
	}
	return k, nil
}

// build compiles source to machine code.
func build(l *library, source, option string) ([]byte, error) {
	src, name, opts := append([]byte(source), 0), []byte("kernels.cu\x00"), [][]byte{append([]byte(option), 0), []byte("--std=c++17\x00")}
	var prog uintptr
	if s := l.call("nvrtcCreateProgram", uintptr(unsafe.Pointer(&prog)), uintptr(unsafe.Pointer(&src[0])), uintptr(unsafe.Pointer(&name[0])), 0, 0, 0); s != 0 {
		return nil, fmt.Errorf("cuda: nvrtcCreateProgram: status %d", s)
	}
	defer l.call("nvrtcDestroyProgram", uintptr(unsafe.Pointer(&prog)))
	pointers := []*byte{&opts[0][0], &opts[1][0]}
	status := l.call("nvrtcCompileProgram", prog, uintptr(len(pointers)), uintptr(unsafe.Pointer(&pointers[0])))
	var n uint64
	if status != 0 {
		l.call("nvrtcGetProgramLogSize", prog, uintptr(unsafe.Pointer(&n)))
		log := make([]byte, n+1)
		l.call("nvrtcGetProgramLog", prog, uintptr(unsafe.Pointer(&log[0])))
		return nil, fmt.Errorf("cuda: compile the kernels (%s): status %d:\n%s", option, status, cString(&log[0]))
	}
	if s := l.call("nvrtcGetCUBINSize", prog, uintptr(unsafe.Pointer(&n))); s != 0 || n == 0 {
		return nil, fmt.Errorf("cuda: nvrtcGetCUBINSize: status %d, %d bytes", s, n)
	}
	out := make([]byte, n)
	if s := l.call("nvrtcGetCUBIN", prog, uintptr(unsafe.Pointer(&out[0]))); s != 0 {
		return nil, fmt.Errorf("cuda: nvrtcGetCUBIN: status %d", s)
	}
	return out, nil
}

// grid is the shape of a launch.
type grid struct{ x, y, z, threads int }

// launcher launches kernels of one module on one stream. Its first error sticks: a caller looks once, at the end.
type launcher struct {
	*stream
	kernels  *kernels
	args     [12]uint64
	pointers [12]*uint64
	config   launchConfig
	overlap  bool // kernels may begin to come while the one before ends
	err      error
}

func newLauncher(s *stream, k *kernels) *launcher {
	l := &launcher{stream: s, kernels: k}
	for i := range l.args {
		l.pointers[i] = &l.args[i]
	}
	return l
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

// launch queues a kernel. An argument that is narrower than 64 bits stands in the low bits.
func (l *launcher) launch(name string, g grid, args ...uint64) {
	if l.err != nil {
		return
	}
	copy(l.args[:], args)
	l.config = launchConfig{
		gridX: uint32(max(g.x, 1)), gridY: uint32(max(g.y, 1)), gridZ: uint32(max(g.z, 1)), blockX: uint32(g.threads), blockY: 1, blockZ: 1,
		stream: l.handle, attributes: &serialization,
	}
	if l.overlap {
		l.config.count = 1
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
