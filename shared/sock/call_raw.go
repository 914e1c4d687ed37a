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

// gather writes of pieces what there is room for, or fewer, and says how many bytes that were.
func gather(fd uintptr, pieces [][]byte) int {
	var list [16]syscall.Iovec
	n := 0
	for _, p := range pieces[:min(len(pieces), len(list))] {
		if len(p) > 0 {
			list[n].Base = unsafe.SliceData(p)
			list[n].SetLen(len(p))
			n++
		}
	}
	written, err := result(syscall.RawSyscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&list)), uintptr(n)))
	if err != nil {
		return 0
	}
	return written
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
