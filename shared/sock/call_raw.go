//go:build linux && !race

package sock

import (
	"syscall"
	"unsafe"
)

// The sockets never block, so the scheduler is not told of the calls: telling it costs more than a read, and has it hand
// the processor over when the machine is busy.

func read(fd uintptr, p []byte) (int, error) {
	return result(syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p))))
}

func write(fd uintptr, p []byte) (int, error) {
	return result(syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p))))
}

func result(n, _ uintptr, errno syscall.Errno) (int, error) {
	if errno != 0 {
		return -1, errno
	}
	return int(n), nil
}

// silent tells whether a socket has nothing to read, not even its end.
func silent(fd uintptr) bool {
	var one [1]byte
	_, _, errno := syscall.RawSyscall6(syscall.SYS_RECVFROM, fd, uintptr(unsafe.Pointer(&one)), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	return errno == syscall.EAGAIN
}
