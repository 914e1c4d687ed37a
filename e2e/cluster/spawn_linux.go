package cluster

import (
	"runtime"
	"syscall"
)

// run owns the locked thread.
func (s *spawner) run() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for {
		select {
		case r := <-s.requests:
			r.answer <- r.cmd.Start()
		case <-s.end:
			return
		}
	}
}

// childAttr keeps the child in our process group, so that a signal to the group reaches it, and ends it with us.
func childAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM} }
