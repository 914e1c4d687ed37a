package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"meridian.internal/clocksync/estimate"
	"meridian.internal/clocksync/respond"
	"meridian.internal/clocksync/service"
	"meridian.internal/clocksync/utc"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
	"meridian.internal/shared/serve"
)

// serveCmd are the options of the daemon.
type serveCmd struct {
	Name            string        `help:"Name of this daemon in the registry and in 'via'." default:"clocksync"`
	Listen          string        `help:"Address of /healthz, /metrics and /clocks." default:"127.0.0.1:9400" placeholder:"HOST:PORT"`
	Advertise       string        `help:"Host, or host:port, that others reach this daemon at; default: as it listens." placeholder:"HOST[:PORT]"`
	Nats            string        `help:"NATS server." name:"nats" default:"nats://127.0.0.1:4222" placeholder:"URL"`
	Worker          []string      `help:"Foreign worker that is in no registry: its /steady_clock_offset is read over HTTP and gets 'offset' alone." placeholder:"[NAME=]URL"`
	SharedKernelDir string        `help:"Folder shared by co-located containers, in which they prove that they run on one kernel." type:"path" placeholder:"DIR"`
	ClockKeyFile    string        `help:"File with the HMAC key of clock packets; the same on every process. Default: derived from --cluster-token; without that they are not signed." type:"path" placeholder:"FILE"`
	NTP             []string      `help:"NTP server for UTC; give three or more, of which a majority must agree. Default: no UTC." name:"ntp" placeholder:"HOST[:PORT]"`
	NTPEvery        time.Duration `help:"Least time between two questions to an NTP server." name:"ntp-every" default:"64s"`
	NTPUnanchored   bool          `help:"Believe NTP servers that tell their own clock (a laboratory)." name:"ntp-unanchored"`
	ClockRho        float64       `help:"Declared limit on the rate difference of two clocks, in ppm. Too small a number makes bounds that miss." default:"200"`
	ClockEta        float64       `help:"Declared limit on its change, in ppm per second: 0.1 for steady rooms, 0.5 for hot machines." default:"0.1"`
	Burst           int           `help:"Exchanges in one burst; 8 for loaded networks." default:"4"`
	VoidAfter       time.Duration `help:"An estimate without new bursts is void after this." default:"10m"`

	serve.ClusterFlags `embed:"" group:"Security"`
}

// Run runs the daemon.
func (c *serveCmd) Run(ctx context.Context, log *slog.Logger) error {
	workers, err := parseWorkers(c.Worker)
	if err != nil {
		return err
	}
	cluster, err := c.ClusterFlags.Open()
	if err != nil {
		return err
	}
	key, err := readKey(c.ClockKeyFile)
	if err != nil {
		return err
	}
	if key == nil {
		key = cluster.Key("clock")
	}
	if c.ClockRho <= 0 || c.ClockRho > 100_000 || c.ClockEta <= 0 || c.ClockEta > 1000 {
		return fmt.Errorf("--clock-rho %v, --clock-eta %v: want positive numbers of ppm (at most 100000 and 1000)", c.ClockRho, c.ClockEta)
	}
	if err := bus.CheckURLs(c.Nats); err != nil {
		return fmt.Errorf("--nats %w", err)
	}
	if c.NTPEvery < time.Second {
		return fmt.Errorf("--ntp-every %v: want at least 1s", c.NTPEvery)
	}
	if c.Burst < 1 || c.Burst > 64 {
		return fmt.Errorf("--burst %d: want 1 to 64", c.Burst)
	}
	steady, err := clock.New(clock.Options{})
	if err != nil {
		return err
	}
	conn, err := bus.Connect(ctx, bus.Options{URL: c.Nats, Name: c.Name, Logger: log, Token: cluster.Token(), TLS: cluster.Client})
	if err != nil {
		return err
	}
	defer conn.Close()
	metrics := serve.NewRegistry()
	strangers, err := serve.Limited(log, metrics, "meridian_clock_limited_log_lines_total")
	if err != nil {
		return err
	}
	registry := node.NewRegistry(conn, strangers, nil)
	var u *utc.Tracker
	if len(c.NTP) > 0 {
		u = utc.New(utc.Options{Servers: c.NTP, Steady: steady, Every: c.NTPEvery, Unanchored: c.NTPUnanchored, Logger: log})
	}
	svc := service.New(service.Options{
		Name: c.Name, Steady: steady, Conn: conn, Registry: registry, Key: key, KernelDir: c.SharedKernelDir, Burst: c.Burst,
		Limits: estimate.Config{RhoPPM: c.ClockRho, EtaPPMPerS: c.ClockEta, VoidAfter: c.VoidAfter},
		UTC:    u, Workers: workers, Logger: log,
		Transport: func(t *http.Transport) http.RoundTripper { return cluster.Transport(t, registry.Has) },
	})
	return c.serve(ctx, daemon{svc, registry, conn, steady, key, cluster, metrics, log})
}

// daemon is what serve ties together.
type daemon struct {
	svc      *service.Service
	registry *node.Registry
	conn     *bus.Conn
	steady   *clock.Steady
	key      []byte
	cluster  *serve.Cluster
	metrics  *prometheus.Registry
	log      *slog.Logger
}

func (c *serveCmd) serve(ctx context.Context, d daemon) error {
	if err := d.svc.Register(d.metrics); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	srv, err := serve.New(serve.Options{Listen: c.Listen, Logger: d.log, Registry: d.metrics, Allow: d.cluster.Allow, TLS: d.cluster.Server})
	if err != nil {
		return err
	}
	d.svc.Routes(srv.Echo())
	resp, err := respond.Listen("", d.steady, respond.Options{Key: d.key, KernelDir: c.SharedKernelDir, Logger: d.log})
	if err != nil {
		return err
	}
	host, port, err := net.SplitHostPort(srv.Addr())
	if err != nil {
		return fmt.Errorf("address %q: %w", srv.Addr(), err)
	}
	if h, p, err := net.SplitHostPort(c.Advertise); err == nil {
		host, port = h, p
	} else if c.Advertise != "" {
		host = c.Advertise
	}
	lease, err := node.Register(ctx, d.conn, func() node.Info {
		return node.Info{
			Name: c.Name, Role: node.RoleClocksync, URL: d.cluster.Scheme() + "://" + net.JoinHostPort(host, port), ClockAddr: resp.Advertised(host),
			ClockID: d.steady.ID(), PID: os.Getpid(), State: node.Ready, Version: serve.Version(),
		}
	}, d.log)
	if err != nil {
		return err
	}
	defer lease.Close()
	d.log.Info("clocksync serves", "listen", srv.Addr(), "clock", resp.Addr(), "clock_id", d.steady.ID(), "anchor_err_ns", d.steady.AnchorErrNS())
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return srv.Serve(ctx) })
	g.Go(func() error { return resp.Serve(ctx) })
	g.Go(func() error { return d.registry.Run(ctx) })
	g.Go(func() error { return d.svc.Run(ctx) })
	return g.Wait()
}

// parseWorkers reads NAME=URL or URL alone.
func parseWorkers(in []string) ([]service.Worker, error) {
	var out []service.Worker
	for _, s := range in {
		name, at, ok := strings.Cut(s, "=")
		if !ok || strings.Contains(name, "/") {
			name, at = "", s
		}
		u, err := url.Parse(at)
		if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return nil, fmt.Errorf("--worker %q: want [NAME=]http://HOST:PORT", s)
		}
		if name == "" {
			_, name, _ = strings.Cut(at, "://")
		}
		out = append(out, service.Worker{Name: name, URL: at})
	}
	return out, nil
}

func readKey(path string) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--clock-key-file: %w", err)
	}
	key := strings.TrimSpace(string(b))
	if len(key) < 16 {
		return nil, fmt.Errorf("--clock-key-file %s: %d bytes, want at least 16", path, len(key))
	}
	return []byte(key), nil
}
