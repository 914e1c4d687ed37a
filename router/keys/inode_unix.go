//go:build unix

package keys

import (
	"io/fs"
	"syscall"
)

// inodeOf tells two files of one path apart: a rename over the path may keep size and time.
func inodeOf(i fs.FileInfo) any {
	if st, ok := i.Sys().(*syscall.Stat_t); ok {
		return st.Ino
	}
	return nil
}
