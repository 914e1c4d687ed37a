//go:build cuda

package cuda

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"unsafe"
)

var compilerCalls = []string{
	"nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcGetProgramLogSize", "nvrtcGetProgramLog", "nvrtcGetCUBINSize",
	"nvrtcGetCUBIN", "nvrtcDestroyProgram", "nvrtcVersion",
}

// compiler is libnvrtc.
type compiler struct{ *library }

func openCompiler() (*compiler, error) {
	l, err := openLibrary([]string{"libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"}, compilerCalls)
	if err != nil {
		return nil, err
	}
	return &compiler{l}, nil
}

// version is what the machine code may depend on.
func (c *compiler) version() string {
	var major, minor int32
	c.call("nvrtcVersion", uintptr(unsafe.Pointer(&major)), uintptr(unsafe.Pointer(&minor)))
	return fmt.Sprintf("%s %d.%d", c.name, major, minor)
}

// cached gives the machine code of source. dir holds what was compiled before, by the hash of everything that it depends
// on; "" keeps nothing. A cache that cannot be read or written costs time and nothing else.
func (c *context) cached(dir, source, option string) ([]byte, error) {
	l, err := openCompiler()
	if err != nil {
		return nil, err
	}
	var driverVersion int32
	if err := c.do("cuDriverGetVersion", uintptr(unsafe.Pointer(&driverVersion))); err != nil {
		return nil, err
	}
	return l.cached(dir, source, option, fmt.Sprintf("driver %d", driverVersion))
}

func (c *compiler) cached(dir, source, option, driver string) ([]byte, error) {
	if dir == "" {
		return c.build(source, option)
	}
	hash := sha256.Sum256([]byte(c.version() + "\x00" + driver + "\x00" + option + "\x00" + source))
	path := filepath.Join(dir, hex.EncodeToString(hash[:])+".cubin")
	if binary, err := os.ReadFile(path); err == nil && len(binary) > sha256.Size {
		code, sum := binary[sha256.Size:], sha256.Sum256(binary[sha256.Size:])
		if string(sum[:]) == string(binary[:sha256.Size]) { // a torn file is compiled anew
			return code, nil
		}
	}
	code, err := c.build(source, option)
	if err != nil {
		return nil, err
	}
	keepFile(path, code)
	return code, nil
}

// keepFile writes code behind its hash, by a rename: several nodes start at the same time.
func keepFile(path string, code []byte) {
	if os.MkdirAll(filepath.Dir(path), 0o755) != nil {
		return
	}
	f, err := os.CreateTemp(filepath.Dir(path), "new-*")
	if err != nil {
		return
	}
	sum := sha256.Sum256(code)
	_, err = f.Write(append(sum[:], code...))
	if closeErr := f.Close(); err == nil && closeErr == nil && os.Rename(f.Name(), path) == nil {
		return
	}
	_ = os.Remove(f.Name())
}

// build compiles source to machine code.
func (c *compiler) build(source, option string) ([]byte, error) {
	code, _, err := c.compile(source, option, "--std=c++17")
	return code, err
}

// compile also gives what the compiler has to say.
func (c *compiler) compile(source string, options ...string) (code []byte, log string, err error) {
	src, name := append([]byte(source), 0), []byte("kernels.cu\x00")
	var prog uintptr
	if s := c.call("nvrtcCreateProgram", uintptr(unsafe.Pointer(&prog)), uintptr(unsafe.Pointer(&src[0])), uintptr(unsafe.Pointer(&name[0])), 0, 0, 0); s != 0 {
		return nil, "", fmt.Errorf("cuda: nvrtcCreateProgram: status %d", s)
	}
	defer c.call("nvrtcDestroyProgram", uintptr(unsafe.Pointer(&prog)))
	pointers := make([]*byte, len(options))
	for i, o := range options {
		pointers[i] = &append([]byte(o), 0)[0]
	}
	status := c.call("nvrtcCompileProgram", prog, uintptr(len(pointers)), uintptr(unsafe.Pointer(&pointers[0])))
	var n uint64
	c.call("nvrtcGetProgramLogSize", prog, uintptr(unsafe.Pointer(&n)))
	text := make([]byte, n+1)
	c.call("nvrtcGetProgramLog", prog, uintptr(unsafe.Pointer(&text[0])))
	log = cString(&text[0])
	if status != 0 {
		return nil, log, fmt.Errorf("cuda: compile the kernels (%v): status %d:\n%s", options, status, log)
	}
	if s := c.call("nvrtcGetCUBINSize", prog, uintptr(unsafe.Pointer(&n))); s != 0 || n == 0 {
		return nil, log, fmt.Errorf("cuda: nvrtcGetCUBINSize: status %d, %d bytes", s, n)
	}
	code = make([]byte, n)
	if s := c.call("nvrtcGetCUBIN", prog, uintptr(unsafe.Pointer(&code[0]))); s != 0 {
		return nil, log, fmt.Errorf("cuda: nvrtcGetCUBIN: status %d", s)
	}
	return code, log, nil
}
