package cluster

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
)

// Process is one daemon of the cluster.
type Process struct {
	Name   string // ctx0, gen0, router, clocksync
	Kind   string // binary: ctxnode, gennode, router, clocksync
	URL    string
	Log    string // file of its stdout and stderr
	args   []string
	bin    string
	client *http.Client // asks for its health
	apart  bool         // in a process group of its own
	enter  []string     // command that turns into bin, in another namespace; empty: none

	cmd    *exec.Cmd
	killed atomic.Bool   // by Signal
	done   chan struct{} // closed when it has ended
	err    error         // of Wait; readable when done is closed
}

// spawner starts processes from one locked OS thread, because the kernel ends a child (PDEATHSIG) when the thread that
// started it ends: so no daemon outlives a cluster that was killed.
type spawner struct {
	requests chan spawnRequest
	end      chan struct{}
}

type spawnRequest struct {
	cmd    *exec.Cmd
	answer chan error
}

func newSpawner() *spawner {
	s := &spawner{requests: make(chan spawnRequest), end: make(chan struct{})}
	go s.run()
	return s
}

func (s *spawner) start(cmd *exec.Cmd) error {
	r := spawnRequest{cmd, make(chan error, 1)}
	s.requests <- r
	return <-r.answer
}

func (s *spawner) stop() { close(s.end) }

// start runs the process; it logs to its file, behind what an earlier start wrote.
func (p *Process) start(s *spawner) error {
	if err := os.MkdirAll(filepath.Dir(p.Log), 0o755); err != nil {
		return err
	}
	log, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own descriptor
	line := append(slices.Clone(p.enter), p.Args()...)
	p.cmd = exec.Command(line[0], line[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = childAttr(p.apart)
	p.cmd.Env = environment()
	if err := s.start(p.cmd); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	p.killed.Store(false)
	p.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		p.err = cmd.Wait()
		close(done)
	}(p.cmd, p.done)
	return nil
}

// environment is ours without MERIDIAN_*: the options of a daemon are those of its command line.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), withheld)
}

func withheld(variable string) bool { return strings.HasPrefix(variable, "MERIDIAN_") }

// Withheld names the variables of ours that daemons would take for options and are not given.
func Withheld() (names []string) {
	for _, e := range os.Environ() {
		if name, _, _ := strings.Cut(e, "="); withheld(e) && !strings.HasPrefix(name, "MERIDIAN_TEST_") {
			names = append(names, name)
		}
	}
	return names
}

// PID is the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Args is its command line.
func (p *Process) Args() []string { return append([]string{p.bin}, p.args...) }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running says whether it has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Signal sends a signal: SIGTERM to drain, SIGKILL to die, SIGSTOP for a host that vanishes with its connections open.
func (p *Process) Signal(sig syscall.Signal) error {
	if sig == syscall.SIGKILL {
		p.killed.Store(true)
	}
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal %s: %w", p.Name, err)
	}
	return nil
}

// Wait waits for the end and returns the error of the exit: nil for exit code 0.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return fmt.Errorf("wait for %s: %w", p.Name, ctx.Err())
	}
}

// Terminate drains the process and kills it when it takes longer than grace. The error says how it ended if not well, unless
// it was killed by Signal, which it may not have noticed yet.
func (p *Process) Terminate(grace time.Duration) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case <-p.done:
		if p.err != nil && !p.killed.Load() {
			return fmt.Errorf("%s: %w; see %s", p.Name, p.err, p.Log)
		}
		return nil
	case <-time.After(grace):
	}
	_ = p.Signal(syscall.SIGCONT)
	_ = p.Signal(syscall.SIGKILL)
	<-p.done
	return fmt.Errorf("%s did not end within %v and was killed; its log ends with:\n%s", p.Name, grace, p.LogTail(10))
}

// LogTail is the end of the log, for an error message.
func (p *Process) LogTail(lines int) string {
	b, err := os.ReadFile(p.Log)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(b), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
