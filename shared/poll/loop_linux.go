package poll

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Loop waits for sockets. The zero value is ready: its goroutine begins with the first watch and ends with Close.
type Loop struct {
	mu      sync.Mutex // guards what follows
	epoll   *os.File   // the runtime's poller waits for it; nil: nobody came yet
	fd      int        // of epoll
	ended   chan struct{}
	closed  bool
	last    int32 // id
	watches map[int32]*Watch
}

// Watch is a socket that is watched.
type Watch struct {
	loop   *Loop
	socket syscall.RawConn
	id     int32 // unlike a descriptor, it is not given to another socket soon

	mu   sync.Mutex // held while seen runs; guards over
	seen func() bool
	over bool
}

// open begins. The mutex is held.
func (l *Loop) open() error {
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
	l.epoll, l.fd, l.ended, l.watches = file, fd, make(chan struct{}), map[int32]*Watch{}
	go func() { defer close(l.ended); l.run(file) }()
	return nil
}

// batch is how many sockets are told of after one wait at most.
const batch = 128

// run waits until Close.
func (l *Loop) run(file *os.File) {
	raw, err := file.SyscallConn()
	if err != nil {
		return
	}
	var events [batch]unix.EpollEvent
	var told [batch]*Watch
	n := 0
	some := func(fd uintptr) bool {
		n = look(fd, events[:])
		return n > 0
	}
	for raw.Read(some) == nil {
		l.mu.Lock()
		for i, e := range events[:n] {
			told[i] = l.watches[e.Fd]
		}
		l.mu.Unlock()
		for i, w := range told[:n] {
			if w != nil {
				w.tell()
			}
			told[i] = nil
		}
	}
}

// look is epoll_wait without a wait, so that the scheduler need not be told. An error is as good as nothing: it comes again.
func look(fd uintptr, events []unix.EpollEvent) int {
	n, _, errno := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, fd, uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), 0, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}

func (e Event) mask() uint32 {
	if e == Left {
		return unix.EPOLLRDHUP | unix.EPOLLET
	}
	return unix.EPOLLIN
}

// Watch calls seen on the loop's goroutine whenever there is something to see, until seen returns false or the watch is
// stopped. seen must not block: all other sockets of the loop wait for it. Who closes the socket stops the watch too. After Close
// it returns ErrClosed.
func (l *Loop) Watch(socket syscall.RawConn, on Event, seen func() (more bool)) (*Watch, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil, ErrClosed
	}
	if l.epoll == nil {
		if err := l.open(); err != nil {
			return nil, fmt.Errorf("begin to watch sockets: %w", err)
		}
	}
	for l.last++; l.watches[l.last] != nil; l.last++ { // it comes round again after 2^32 watches
	}
	w := &Watch{loop: l, socket: socket, id: l.last, seen: seen}
	l.watches[w.id] = w // before the first event
	var failed error
	err := socket.Control(func(fd uintptr) {
		failed = unix.EpollCtl(l.fd, unix.EPOLL_CTL_ADD, int(fd), &unix.EpollEvent{Events: on.mask(), Fd: w.id})
	})
	if err = errors.Join(err, failed); err != nil {
		delete(l.watches, w.id)
		return nil, fmt.Errorf("watch a socket: %w", err)
	}
	return w, nil
}

func (w *Watch) tell() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over && !w.seen() {
		w.end()
	}
}

// Stop ends the watch, if seen has not; seen does not run any more when it returns. It is not for seen to call. A nil watch has ended.
func (w *Watch) Stop() {
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over {
		w.end()
	}
}

// end is called with the watch's mutex held. A socket that is closed has left the epoll by itself.
func (w *Watch) end() {
	w.over = true
	l := w.loop
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.watches, w.id)
	if l.closed {
		return // the epoll is gone, and its number may be another file's
	}
	_ = w.socket.Control(func(fd uintptr) { _ = unix.EpollCtl(l.fd, unix.EPOLL_CTL_DEL, int(fd), nil) })
}

// Close ends the loop's goroutine: nothing is told any more.
func (l *Loop) Close() error {
	l.mu.Lock()
	file, ended := l.epoll, l.ended
	l.closed = true
	l.mu.Unlock()
	if file == nil {
		return nil
	}
	err := file.Close()
	<-ended
	return err
}
