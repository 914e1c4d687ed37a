//go:build !linux

package cluster

import "syscall"

func (s *spawner) run() {
	for {
		select {
		case r := <-s.requests:
			r.answer <- r.cmd.Start()
		case <-s.end:
			return
		}
	}
}

func childAttr(apart bool) *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: apart} }
