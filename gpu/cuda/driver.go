//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/ebitengine/purego"
)

// ErrUnavailable is wrapped by errors that say that this machine cannot run the back end.
var ErrUnavailable = errors.New("cuda: not available on this machine")

// library is a shared library with the functions that are used of it. It never changes once it is open.
type library struct {
	name  string
	calls map[string]uintptr
}

// openLibrary opens the first of names that there is.
func openLibrary(names []string, calls []string) (*library, error) {
	var errs []error
	for _, name := range names {
		h, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		l := &library{name: name, calls: make(map[string]uintptr, len(calls))}
		for _, c := range calls {
			if l.calls[c], err = purego.Dlsym(h, c); err != nil {
				return nil, fmt.Errorf("%w: %s has no %s: a newer version is needed", ErrUnavailable, name, c)
			}
		}
		return l, nil
	}
	return nil, fmt.Errorf("%w: open %s: %w", ErrUnavailable, names[0], errors.Join(errs...))
}

// call returns the function's status. Pointers must be converted in the call itself: then they stay where they are.
//
//go:uintptrescapes
func (l *library) call(name string, args ...uintptr) int32 {
	r, _, _ := purego.SyscallN(l.calls[name], args...)
	return int32(r)
}

// driver is libcuda.
type driver struct{ *library }

var driverCalls = []string{
	"cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute", "cuDeviceGetName",
	"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease_v2", "cuCtxSetCurrent", "cuGetErrorString",
	"cuMemAlloc_v2", "cuMemFree_v2", "cuMemHostAlloc", "cuMemFreeHost", "cuMemGetInfo_v2", "cuMemHostRegister_v2", "cuMemHostUnregister",
	"cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuMemsetD8Async",
	"cuStreamCreate", "cuStreamDestroy_v2", "cuStreamSynchronize", "cuStreamWaitEvent", "cuStreamBeginCapture_v2", "cuStreamEndCapture",
	"cuGraphInstantiateWithFlags", "cuGraphLaunch", "cuGraphExecDestroy", "cuGraphDestroy",
	"cuEventCreate", "cuEventDestroy_v2", "cuEventRecord", "cuEventSynchronize",
	"cuModuleLoadData", "cuModuleUnload", "cuModuleGetFunction", "cuFuncSetAttribute", "cuLaunchKernelEx",
	"cuEventElapsedTime", "cuEventRecordWithFlags", "cuDeviceGetUuid_v2",
	"cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle",
	"cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess", "cuMemcpyPeerAsync", "cuMemcpyDtoDAsync_v2", "cuTensorMapEncodeTiled",
}

func openDriver() (*driver, error) {
	names := []string{"libcuda.so.1"}
	old, err := openLibrary(names, []string{"cuDriverGetVersion"})
	if err != nil {
		return nil, err
	}
	l, err := openLibrary(names, driverCalls)
	if err != nil {
		var version int32
		old.call("cuDriverGetVersion", uintptr(unsafe.Pointer(&version)))
		return nil, fmt.Errorf("%w (the driver here is for CUDA %d.%d)", err, version/1000, version%1000/10)
	}
	d := &driver{l}
	if err := d.do("cuInit", 0); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	return d, nil
}

// do calls and turns the status into an error with the driver's own text.
//
//go:uintptrescapes
func (d *driver) do(name string, args ...uintptr) error {
	status := d.call(name, args...)
	if status == 0 {
		return nil
	}
	return d.failed(name, status)
}

// failed is the error of a call.
func (d *driver) failed(name string, status int32) error {
	var text *byte
	if d.call("cuGetErrorString", uintptr(uint32(status)), uintptr(unsafe.Pointer(&text))) != 0 || text == nil {
		return fmt.Errorf("cuda: %s: status %d", name, status)
	}
	return fmt.Errorf("cuda: %s: %s (%d)", name, cString(text), status)
}

func cString(p *byte) string {
	n := 0
	for *(*byte)(unsafe.Add(unsafe.Pointer(p), n)) != 0 {
		n++
	}
	return string(unsafe.Slice(p, n))
}

// context is a card in use. Threads bind it with current.
type context struct {
	*driver
	device int32
	handle uintptr
	arch   int // compute capability times 10
	cores  int // multiprocessors
	uuid   [16]byte
	name   string
}

func openContext(gpu int) (*context, error) {
	d, err := openDriver()
	if err != nil {
		return nil, err
	}
	var n int32
	if err := d.do("cuDeviceGetCount", uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	if gpu < 0 || gpu >= int(n) {
		return nil, fmt.Errorf("%w: card %d, there are %d", ErrUnavailable, gpu, n)
	}
	c := &context{driver: d}
	var major, minor, cores int32
	var name [128]byte
	const attributeMajor, attributeMinor, attributeCores = 75, 76, 16
	for _, err := range []error{
		d.do("cuDeviceGet", uintptr(unsafe.Pointer(&c.device)), uintptr(gpu)),
		d.do("cuDeviceGetAttribute", uintptr(unsafe.Pointer(&major)), attributeMajor, uintptr(c.device)),
		d.do("cuDeviceGetAttribute", uintptr(unsafe.Pointer(&minor)), attributeMinor, uintptr(c.device)),
		d.do("cuDeviceGetAttribute", uintptr(unsafe.Pointer(&cores)), attributeCores, uintptr(c.device)),
		d.do("cuDeviceGetUuid_v2", uintptr(unsafe.Pointer(&c.uuid[0])), uintptr(c.device)),
		d.do("cuDeviceGetName", uintptr(unsafe.Pointer(&name[0])), uintptr(len(name)), uintptr(c.device)),
	} {
		if err != nil {
			return nil, err
		}
	}
	c.arch, c.cores, c.name = int(10*major+minor), int(cores), cString(&name[0])
	if c.arch < 80 {
		return nil, fmt.Errorf("%w: %s has compute capability %d.%d, at least 8.0 is needed", ErrUnavailable, c.name, major, minor)
	}
	if err := d.do("cuDevicePrimaryCtxRetain", uintptr(unsafe.Pointer(&c.handle)), uintptr(c.device)); err != nil {
		return nil, err
	}
	return c, c.current()
}

// current binds the context to the calling thread, which must be locked to its goroutine.
func (c *context) current() error { return c.do("cuCtxSetCurrent", c.handle) }

func (c *context) close() error { return c.do("cuDevicePrimaryCtxRelease_v2", uintptr(c.device)) }
