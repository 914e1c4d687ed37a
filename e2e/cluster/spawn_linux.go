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

// childAttr keeps the child in our process group, so that a signal to the group reaches it, and ends it with us. One that is apart
// ends at once with us, since nothing else reaches it then.
func childAttr(apart bool) *syscall.SysProcAttr {
	if apart {
		return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	}
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
}
