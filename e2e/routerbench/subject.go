package routerbench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"meridian.internal/shared/ports"
)

// subject is one thing that is measured: a process that forwards, or nothing (direct).
type subject struct {
	name string
	addr string // host:port of clients' requests; empty: both legs are played
	ctx  string // of the context worker, where both legs are played
	gen  string
	cmd  *exec.Cmd // nil: direct
	skip string    // why it cannot be measured here; empty: it can
}

// connection is a client's way to a subject: the legs that it plays in order.
type connection struct {
	legs []*player
	sent [][]byte
	want []int // tokens of each leg's answer
}

func (s *subject) connect(l load) (*connection, error) {
	if s.addr != "" {
		return open([]string{s.addr}, [][]byte{request(s.addr, l.prompt, l.tokens, "")}, []int{l.tokens})
	}
	return open([]string{s.ctx, s.gen}, [][]byte{
		request(s.ctx, l.prompt, l.tokens, ctxParams), request(s.gen, l.prompt, l.tokens, genParams),
	}, []int{0, l.tokens})
}

func open(addrs []string, sent [][]byte, want []int) (*connection, error) {
	c := &connection{sent: sent, want: want}
	for _, a := range addrs {
		p, err := dial(a)
		if err != nil {
			c.close()
			return nil, err
		}
		c.legs = append(c.legs, p)
	}
	return c, nil
}

// endBy bounds all that is sent and read.
func (c *connection) endBy(t time.Time) {
	for _, leg := range c.legs {
		_ = leg.SetDeadline(t)
	}
}

func (c *connection) last() *player { return c.legs[len(c.legs)-1] }

func (c *connection) play() error {
	for i, leg := range c.legs {
		if err := leg.play(c.sent[i], c.want[i]); err != nil {
			return err
		}
	}
	return nil
}

func (c *connection) close() {
	for _, leg := range c.legs {
		_ = leg.Close()
	}
}

// Bench is where a run finds what it starts.
type Bench struct {
	Self   string // this program: its subcommands worker, naive and hop are the mocks
	Router string // the router's binary
	Dir    string // folder for what the processes write
}

// start runs a command whose first line on stdout says where it listens.
func start(ctx context.Context, addresses any, path string, args ...string) (*exec.Cmd, error) {
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 3 * time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", path, err)
	}
	if err := json.NewDecoder(out).Decode(addresses); err != nil {
		return nil, fmt.Errorf("start %s %s: it did not say where it listens: %w", path, strings.Join(args, " "), errors.Join(err, stop(cmd)))
	}
	return cmd, nil
}

// stop ends a process; a second without an end is too long.
func stop(cmd *exec.Cmd) error {
	if cmd == nil {
		return nil
	}
	_ = cmd.Process.Signal(syscall.SIGTERM)
	late := time.AfterFunc(5*time.Second, func() { _ = cmd.Process.Kill() })
	defer late.Stop()
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		return err
	}
	return nil
}

// Listening is the line by which the mocks say where they listen.
type Listening struct {
	Ctx     string `json:"ctx,omitempty"`
	Gen     string `json:"gen,omitempty"`
	Control string `json:"control,omitempty"`
	Addr    string `json:"addr,omitempty"`
}

type maker struct {
	name  string
	start func(context.Context, Listening) (*subject, error)
}

// makers start the subjects, in the order of the table.
func (b Bench) makers() []maker {
	ownServer := func(name string) maker {
		return maker{name, func(ctx context.Context, w Listening) (*subject, error) { return b.goSubject(ctx, name, w) }}
	}
	return []maker{{"direct", b.direct}, {"nginx", b.nginx}, ownServer("reverseproxy"), ownServer("naive"), {"ours", b.ours}}
}

func (b Bench) direct(_ context.Context, w Listening) (*subject, error) {
	return &subject{name: "direct", ctx: w.Ctx, gen: w.Gen}, nil
}

// goSubject starts one of this program's own servers.
func (b Bench) goSubject(ctx context.Context, name string, w Listening) (*subject, error) {
	var at Listening
	cmd, err := start(ctx, &at, b.Self, name, "--ctx=http://"+w.Ctx, "--gen=http://"+w.Gen)
	if err != nil {
		return nil, err
	}
	return &subject{name: name, addr: at.Addr, cmd: cmd}, nil
}

// ours starts the router with records, clocks and metrics on.
func (b Bench) ours(ctx context.Context, w Listening) (*subject, error) {
	addr, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	nats, err := freeAddress(ctx)
	if err != nil {
		return nil, err
	}
	traces, err := os.MkdirTemp(b.Dir, "traces-")
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, b.Router, "--listen="+addr, "--ctx=http://"+w.Ctx, "--gen=http://"+w.Gen, "--embedded-nats",
		"--nats-listen="+nats, "--clock-listen=127.0.0.1:0", "--traces="+traces, "--max-running=8192", "--log-level=error") // nothing is refused: 1,000 streams are held
	cmd.Env = append(os.Environ(), "MERIDIAN_CONFIG=")
	cmd.Stderr = os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", b.Router, err)
	}
	s := &subject{name: "ours", addr: addr, cmd: cmd}
	if err := s.waitReady(ctx, "/readyz"); err != nil {
		return nil, errors.Join(err, stop(cmd))
	}
	return s, nil
}

// readyTime bounds the start of a subject.
const readyTime = 30 * time.Second

func (s *subject) waitReady(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, readyTime)
	defer cancel()
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+s.addr+path, nil)
		if err != nil {
			return err
		}
		res, err := http.DefaultClient.Do(req)
		if err == nil {
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s at %s was not ready within %v: %w", s.name, s.addr, readyTime, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// freeAddress is a loopback address that nobody listens at; it is kept until ctx ends.
func freeAddress(ctx context.Context) (string, error) {
	const host = "127.0.0.1"
	kept, release, err := ports.Keep(host, 1)
	if err != nil {
		return "", err
	}
	context.AfterFunc(ctx, release)
	return net.JoinHostPort(host, kept[0]), nil
}

// nginx starts one hop to the generation worker, without buffering and with kept connections.
func (b Bench) nginx(ctx context.Context, w Listening) (*subject, error) {
	s := &subject{name: "nginx"}
	path, err := exec.LookPath("nginx")
	if err != nil {
		s.skip = "nginx is not installed"
		return s, nil
	}
	if s.addr, err = freeAddress(ctx); err != nil {
		return nil, err
	}
	file := filepath.Join(b.Dir, "nginx.conf")
	if err := os.WriteFile(file, fmt.Appendf(nil, nginxConf, b.Dir, b.Dir, b.Dir, w.Gen, s.addr), 0o600); err != nil {
		return nil, err
	}
	s.cmd = exec.CommandContext(ctx, path, "-p", b.Dir, "-c", file, "-e", filepath.Join(b.Dir, "nginx.log"))
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", path, err)
	}
	if err := s.waitReady(ctx, "/health"); err != nil {
		return nil, errors.Join(err, stop(s.cmd))
	}
	return s, nil
}

const nginxConf = `daemon off;
worker_processes 2;
pid %s/nginx.pid;
events { worker_connections 4096; }
http {
  access_log off;
  client_body_temp_path %s/nginx-body;
  proxy_temp_path %s/nginx-proxy;
  client_body_buffer_size 1m;
  keepalive_requests 100000000;
  upstream gen { server %s; keepalive 1024; keepalive_requests 100000000; }
  server {
    listen %s;
    location / {
      proxy_pass http://gen;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }
  }
}
`
