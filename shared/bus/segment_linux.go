package bus

import (
	"os"

	"golang.org/x/sys/unix"
)

// mapFile gives f its whole size on disk and maps it; nil where that cannot be. Without room on disk for all of it, a full disk
// would be a signal.
func mapFile(f *os.File, size int64) []byte {
	fd := int(f.Fd())
	if unix.Fallocate(fd, 0, 0, size) != nil {
		return nil
	}
	mem, err := unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil
	}
	return mem
}

func unmapFile(mem []byte) { _ = unix.Munmap(mem) }
