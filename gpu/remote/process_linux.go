package remote

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"syscall"
)

// socketPair gives a connection and its other end, for a process to inherit.
func socketPair() (net.Conn, *os.File, error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	here, there := os.NewFile(uintptr(fds[0]), "rank link"), os.NewFile(uintptr(fds[1]), "rank link")
	c, err := net.FileConn(here)
	_ = here.Close() // the connection has a descriptor of its own
	if err != nil {
		_ = there.Close()
		return nil, nil, err
	}
	return c, there, nil
}

// dieWithParent makes the kernel kill the process when this one is gone: one that is stopped does not see its links end.
func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
