//go:build unix && (!linux || race)

package sock

import (
	"errors"
	"syscall"
)

// The race detector learns from these calls that what was written was before it was read.

func read(fd uintptr, p []byte) (int, error)  { return syscall.Read(int(fd), p) }
func write(fd uintptr, p []byte) (int, error) { return syscall.Write(int(fd), p) }

// gather leaves all to write.
func gather(uintptr, [][]byte) int { return 0 }

// silent tells whether a socket has nothing to read, not even its end.
func silent(fd uintptr) bool {
	var one [1]byte
	_, _, err := syscall.Recvfrom(int(fd), one[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	return errors.Is(err, syscall.EAGAIN)
}
