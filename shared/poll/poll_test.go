package poll

import (
	"errors"
	"io"
	"net"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"
)

// pair is a connection with the socket of one side.
func pair(t *testing.T) (ours net.Conn, socket syscall.RawConn, theirs *net.TCPConn) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("loops are for Linux")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if ours, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ours.Close(); c.Close() })
	if socket, err = ours.(*net.TCPConn).SyscallConn(); err != nil {
		t.Fatal(err)
	}
	return ours, socket, c.(*net.TCPConn)
}

func loop(t *testing.T) *Loop {
	l := new(Loop)
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if len(l.watches) > 0 {
			t.Errorf("%d watches are left", len(l.watches))
		}
	})
	return l
}

const soon = time.Minute

// within waits for a value.
func within[T any](t *testing.T, ch <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(soon):
		t.Fatal("it was not told")
	}
	return v
}

func TestReadableIsToldUntilAllIsRead(t *testing.T) {
	ours, socket, theirs := pair(t)
	got := make(chan string, 100)
	w, err := loop(t).Watch(socket, Readable, func() bool {
		var b [2]byte
		n, err := ours.Read(b[:])
		if err != nil {
			got <- err.Error()
			return false
		}
		got <- string(b[:n])
		return true
	})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	_, _ = io.WriteString(theirs, "abcd")
	for sum := ""; sum != "abcd"; {
		sum += within(t, got)
	}
	_ = theirs.CloseWrite()
	if end := within(t, got); end != "EOF" {
		t.Errorf("got %q", end)
	}
}

func TestLeftIsToldThoughNobodyReads(t *testing.T) {
	for name, leave := range map[string]func(*net.TCPConn){
		"half":   func(c *net.TCPConn) { _ = c.CloseWrite() },
		"closed": func(c *net.TCPConn) { _ = c.Close() },
		"reset":  func(c *net.TCPConn) { _ = c.SetLinger(0); _ = c.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			_, socket, theirs := pair(t)
			left := make(chan struct{}, 1)
			w, err := loop(t).Watch(socket, Left, func() bool { left <- struct{}{}; return false })
			if err != nil {
				t.Fatal(err)
			}
			defer w.Stop()
			_, _ = io.WriteString(theirs, "bytes are not what is waited for")
			leave(theirs)
			within(t, left)
		})
	}
}

// TestNothingIsToldAfterStop stops watches while they are told of bytes all the time.
func TestNothingIsToldAfterStop(t *testing.T) {
	l := loop(t)
	for range 100 {
		ours, socket, theirs := pair(t)
		var mu sync.Mutex
		stopped, told := false, make(chan struct{}, 1)
		w, err := l.Watch(socket, Readable, func() bool {
			mu.Lock()
			defer mu.Unlock()
			if stopped {
				t.Error("told after Stop")
			}
			select {
			case told <- struct{}{}:
			default:
			}
			return true // though nothing was read: it is told again at once
		})
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(theirs, "x")
		within(t, told)
		w.Stop()
		mu.Lock()
		stopped = true
		mu.Unlock()
		w.Stop() // once more is nothing
		ours.Close()
	}
}

func TestASocketClosedByOthersDisturbsNobody(t *testing.T) {
	l := loop(t)
	gone, socket, _ := pair(t)
	first, err := l.Watch(socket, Readable, func() bool { t.Error("told of a closed socket"); return false })
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	_, socket, theirs := pair(t) // most likely with the descriptor of the other
	told := make(chan struct{}, 1)
	second, err := l.Watch(socket, Readable, func() bool { told <- struct{}{}; return false })
	if err != nil {
		t.Fatal(err)
	}
	first.Stop()
	_, _ = io.WriteString(theirs, "x")
	within(t, told)
	second.Stop()
	if _, err := l.Watch(mustSocket(t, gone), Readable, func() bool { return false }); err == nil {
		t.Error("a closed socket is watched")
	}
}

func mustSocket(t *testing.T, c net.Conn) syscall.RawConn {
	t.Helper()
	s, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestLoopsTakeTurns(t *testing.T) {
	l := NewLoops(3)
	seen := map[*Loop]int{}
	for range 9 {
		seen[l.Next()]++
	}
	if len(seen) != 3 || seen[l.Next()] != 3 {
		t.Errorf("got %v", seen)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// A loop that nobody watched before has no epoll: it must not begin one after its end, which nobody would close.
func TestAClosedLoopTakesNoSocket(t *testing.T) {
	_, socket, _ := pair(t)
	for name, before := range map[string]func(*Loop) *Watch{
		"that never had one": func(*Loop) *Watch { return nil },
		"that has one": func(l *Loop) *Watch {
			w, err := l.Watch(socket, Readable, func() bool { return true })
			if err != nil {
				t.Fatal(err)
			}
			return w
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := new(Loop)
			w := before(l)
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			if late, err := l.Watch(socket, Readable, func() bool { return true }); !errors.Is(err, ErrClosed) {
				t.Errorf("it takes one: %v, %v", late, err)
				late.Stop()
			}
			w.Stop()
		})
	}
}
