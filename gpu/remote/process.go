package remote

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"time"
)

// Links are the connections of a rank's process with its node.
type Links struct {
	Rounds net.Conn // gpu/collective's
	orders net.Conn
	kv     net.Conn
}

const (
	firstFD  = 3 // of what a process inherits beyond its standard files
	linkSize = 3 // connections
)

func linksOf(c []net.Conn) Links { return Links{Rounds: c[0], orders: c[1], kv: c[2]} }

func (l Links) close() {
	for _, c := range []net.Conn{l.Rounds, l.orders, l.kv} {
		_ = c.Close()
	}
}

// Inherited gives a process the links that Start left it.
func Inherited() (Links, error) {
	var conns []net.Conn
	for fd := firstFD; fd < firstFD+linkSize; fd++ {
		f := os.NewFile(uintptr(fd), "rank link")
		c, err := net.FileConn(f)
		_ = f.Close() // the connection has a descriptor of its own
		if err != nil {
			return Links{}, fmt.Errorf("remote: descriptor %d is no link to a node, which starts its ranks itself: %w", fd, err)
		}
		conns = append(conns, c)
	}
	return linksOf(conns), nil
}

// Process is the process of a rank. It ends with its node, however that ends.
type Process struct {
	Links
	rank  int
	pid   int
	kill  func() error
	ended chan struct{} // closed when it has ended
	err   error         // how; to be read then
}

// Start begins the process of a rank. Its log goes where this process's goes.
func Start(rank int, cmd *exec.Cmd) (*Process, error) {
	var here []net.Conn
	var there []*os.File
	defer func() {
		for _, f := range there {
			_ = f.Close()
		}
	}()
	for range linkSize {
		c, f, err := socketPair()
		if err != nil {
			for _, c := range here {
				_ = c.Close()
			}
			return nil, fmt.Errorf("remote: rank %d: %w", rank, err)
		}
		here, there = append(here, c), append(there, f)
	}
	cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = there, os.Stdout, os.Stderr
	dieWithParent(cmd)
	p := &Process{Links: linksOf(here), rank: rank, ended: make(chan struct{})}
	began := make(chan error, 1)
	go func() { // Close waits for it
		runtime.LockOSThread() // for the kernel the parent of a process is the thread that began it
		err := cmd.Start()
		began <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.ended)
		}
	}()
	if err := <-began; err != nil {
		p.Links.close()
		return nil, fmt.Errorf("remote: start rank %d: %w", rank, err)
	}
	p.pid, p.kill = cmd.Process.Pid, cmd.Process.Kill
	return p, nil
}

// PID is the id of the process.
func (p *Process) PID() int { return p.pid }

// exitWait is how much later the end of a process may be heard of than that of its connections, also where all wait for a processor.
const exitWait = time.Second

// Why says how the process has ended, if it has: more than the end of its connection, err, says.
func (p *Process) Why(err error) error {
	t := time.NewTimer(exitWait)
	defer t.Stop()
	select {
	case <-p.ended:
		if p.err != nil {
			err = p.err
		} else {
			err = errors.New("it ended by itself")
		}
	case <-t.C:
	}
	return fmt.Errorf("process %d: %w", p.pid, err)
}

// endWait is how long a process may take to end after its links.
const endWait = 5 * time.Second

// Close ends the process and waits for it. One that hangs is killed. The error says that it has not ended well.
func (p *Process) Close() error {
	p.Links.close()
	t := time.NewTimer(endWait)
	defer t.Stop()
	select {
	case <-p.ended:
		if p.err != nil {
			return fmt.Errorf("remote: rank %d, process %d: %w", p.rank, p.pid, p.err)
		}
		return nil
	case <-t.C:
	}
	err := p.Kill()
	<-p.ended
	return errors.Join(fmt.Errorf("remote: rank %d still ran %v after its end, and was killed", p.rank, endWait), err)
}

// Kill ends the process at once.
func (p *Process) Kill() error {
	if err := p.kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("remote: kill rank %d: %w", p.rank, err)
	}
	return nil
}
