package cluster

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"meridian.internal/shared/ports"
)

// plan lays out every process with its addresses and options, before anything is started.
func (c *Cluster) plan() error {
	n := c.cfg.Ctx + c.cfg.Gen
	free, release, err := ports.Keep(c.net.host, 2*n+len(c.cfg.Schedules)+2)
	if err != nil {
		return err
	}
	c.free = release
	at := func(host string) string {
		p := net.JoinHostPort(host, free[0])
		free = free[1:]
		return p
	}
	next := func() string { return at(c.net.host) }
	c.NATS = c.cfg.NATS
	natsListen := ""
	if c.NATS == "" {
		natsListen = next()
		c.NATS = "nats://" + natsListen
	}
	for i, schedule := range c.cfg.Schedules {
		listen := next()
		if i == 0 && c.cfg.Port != 0 {
			listen = net.JoinHostPort(c.net.host, strconv.Itoa(c.cfg.Port))
			if err := vacant(listen); err != nil {
				return err
			}
		}
		c.Routers = append(c.Routers, c.router(i, schedule, listen, natsListen))
		natsListen = ""
	}
	for i := range c.cfg.Ctx {
		name := fmt.Sprintf("ctx%d", i)
		host := c.net.address(name)
		c.Nodes = append(c.Nodes, c.node("ctxnode", name, at(host), "--kv-listen", at(host)))
	}
	for i := range c.cfg.Gen {
		name := fmt.Sprintf("gen%d", i)
		host := c.net.address(name)
		c.Nodes = append(c.Nodes, c.node("gennode", name, at(host), "--kv-listen", at(host)))
	}
	if !c.cfg.NoClocksync {
		c.Clock = c.process("clocksync", "clocksync", next(), "--nats", c.NATS)
	}
	return nil
}

// vacant says whether nobody listens at an address: another's router there would answer for ours that it is ready.
func vacant(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("the router's address (localcluster up: --port, 0 takes a free one): %w", err)
	}
	return l.Close()
}

// trust makes HTTPS of the URLs of those who serve it.
func (c *Cluster) trust(conf *tls.Config) {
	if conf == nil {
		return
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: conf}}
	for _, p := range c.All() {
		if p.Kind != "router" {
			p.URL, p.client = strings.Replace(p.URL, "http://", "https://", 1), client
		}
	}
}

func (c *Cluster) process(kind, name, listen string, args ...string) *Process {
	return &Process{
		Name: name, Kind: kind, URL: "http://" + listen, client: http.DefaultClient, apart: c.cfg.Apart,
		Log:  filepath.Join(c.cfg.Dir, "logs", name+".log"),
		bin:  filepath.Join(c.cfg.Bin, kind),
		args: append(append([]string{"--listen", listen}, args...), c.cfg.Args...),
	}
}

func (c *Cluster) router(i int, schedule, listen, natsListen string) *Process {
	name, traces := "router", c.cfg.Traces
	if i > 0 {
		name = fmt.Sprintf("router-%s", schedule)
		traces = filepath.Join(c.cfg.Traces, name)
	}
	args := []string{"--name", name, "--traces", traces, "--grace", c.cfg.Grace.String()}
	if schedule != "" {
		args = append(args, "--schedule", schedule)
	}
	if natsListen != "" {
		args = append(args, "--embedded-nats", "--nats-listen", natsListen, "--nats-store", filepath.Join(c.cfg.Dir, "nats"))
	} else {
		args = append(args, "--nats", c.NATS)
	}
	return c.process("router", name, listen, append(args, c.cfg.RouterArgs...)...)
}

func (c *Cluster) node(kind, name, listen string, args ...string) *Process {
	args = append(args, "--name", name, "--nats", c.NATS, "--spool", filepath.Join(c.cfg.Dir, "spool", name), "--grace", c.cfg.Grace.String())
	if c.cfg.Model != "" {
		args = append(args, "--model", c.cfg.Model)
	}
	if c.cfg.Device != "" {
		args = append(args, "--device", c.cfg.Device)
	}
	if c.cfg.Device == "cuda" {
		kind += "-cuda" // a build of its own: it needs the system's C library
	}
	place := c.cfg.Places[name]
	p := c.process(kind, name, listen, slices.Concat(args, c.cfg.NodeArgs, place.Args)...)
	p.enter = c.net.enter(name, place)
	return p
}

const (
	pollEvery   = 20 * time.Millisecond
	pollTimeout = 2 * time.Second
)

// WaitReady waits until the process answers /readyz with 200.
func (p *Process) WaitReady(ctx context.Context) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		ok, last := p.ready(ctx)
		if ok {
			return nil
		}
		select {
		case <-p.done:
			return fmt.Errorf("%s ended before it was ready: %v; its log ends with:\n%s", p.Name, p.err, p.LogTail(10)) //nolint:errorlint // it may be nil
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready (%s): %w; its log ends with:\n%s", p.Name, last, ctx.Err(), p.LogTail(10))
		case <-tick.C:
		}
	}
}

func (p *Process) ready(ctx context.Context) (bool, string) {
	ctx, cancel := context.WithTimeout(ctx, pollTimeout)
	defer cancel()
	path := "/readyz"
	if p.Kind == "clocksync" {
		path = "/healthz"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.URL+path, nil)
	if err != nil {
		return false, err.Error()
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return false, err.Error()
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK, resp.Status
}
