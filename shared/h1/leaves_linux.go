package h1

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// watch is a connection's place in leaves.
type watch struct {
	fd         int32 // 0: it has no socket
	generation int32 // tells it from former ones with the same descriptor
}

// leaves sees which clients have left, while nobody reads from their connections. One goroutine waits for all; a
// connection costs a system call when it comes, and a request none. The zero value is ready.
type leaves struct {
	mu         sync.Mutex // guards what follows
	epoll      *os.File   // the runtime's poller waits for it; nil: nobody came yet
	fd         int        // of epoll
	ended      chan struct{}
	generation int32
	conns      map[watch]*conn
}

// open begins. The mutex is held.
func (l *leaves) open() error {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err == nil {
		err = unix.SetNonblock(fd, true) // or os.NewFile would not give it to the runtime's poller
	}
	if err != nil {
		return err
	}
	file := os.NewFile(uintptr(fd), "epoll")
	if err := file.SetDeadline(time.Time{}); err != nil { // the runtime's poller has not taken it
		return errors.Join(err, file.Close())
	}
	l.epoll, l.fd, l.ended, l.conns = file, fd, make(chan struct{}), map[watch]*conn{}
	go func() { defer close(l.ended); l.run(file) }()
	return nil
}

// run waits until close.
func (l *leaves) run(file *os.File) {
	raw, err := file.SyscallConn()
	if err != nil {
		return
	}
	var events [64]unix.EpollEvent
	for {
		n := 0
		if raw.Read(func(fd uintptr) bool {
			n, _ = unix.EpollWait(int(fd), events[:], 0) // an error is as good as nothing: it comes again
			return n > 0
		}) != nil {
			return
		}
		for _, e := range events[:n] {
			l.mu.Lock()
			c := l.conns[watch{e.Fd, e.Pad}]
			l.mu.Unlock()
			if c != nil {
				c.leave()
			}
		}
	}
}

// add begins to watch c, which has its leave function. A connection without a socket, as tests have, is not watched.
func (l *leaves) add(c *conn) error {
	if c.Raw() == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.epoll == nil {
		if err := l.open(); err != nil {
			return fmt.Errorf("watch clients: %w", err)
		}
	}
	l.generation++
	var failed error
	err := c.Raw().Control(func(fd uintptr) {
		c.watched = watch{int32(fd), l.generation}
		l.conns[c.watched] = c // before the first event
		failed = l.control(unix.EPOLL_CTL_ADD, c.watched)
	})
	if err = errors.Join(err, failed); err != nil {
		delete(l.conns, c.watched)
		return fmt.Errorf("watch client %s: %w", c.remote, err)
	}
	return nil
}

func (l *leaves) control(op int, w watch) error {
	return unix.EpollCtl(l.fd, op, int(w.fd), &unix.EpollEvent{Events: unix.EPOLLRDHUP | unix.EPOLLET, Fd: w.fd, Pad: w.generation})
}

// remove ends the watch; a connection that is closed has left the epoll by itself.
func (l *leaves) remove(c *conn) {
	if c.watched == (watch{}) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.conns, c.watched)
	_ = c.Raw().Control(func(uintptr) { _ = l.control(unix.EPOLL_CTL_DEL, c.watched) })
}

func (l *leaves) close() error {
	l.mu.Lock()
	file, ended := l.epoll, l.ended
	l.mu.Unlock()
	if file == nil {
		return nil
	}
	err := file.Close()
	<-ended
	return err
}
