package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"meridian.internal/clocksync/respond"
	"meridian.internal/router/clocks"
	"meridian.internal/router/export"
	"meridian.internal/router/keys"
	"meridian.internal/router/live"
	"meridian.internal/router/pool"
	"meridian.internal/router/prefix"
	"meridian.internal/router/proxy"
	"meridian.internal/router/qualify"
	"meridian.internal/router/upstream"
	"meridian.internal/router/web"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/node"
	"meridian.internal/shared/poll"
	"meridian.internal/shared/serve"
)

// daemon is the router's process. Parts that need NATS are nil without it.
type daemon struct {
	o         *options
	log       *slog.Logger
	steady    *clock.Steady
	metrics   *prometheus.Registry
	strangers *slog.Logger // for what others can make this process write
	server    *serve.Server
	cluster   *serve.Cluster
	embedded  *bus.Embedded
	conn      *bus.Conn
	registry  *node.Registry
	client    *upstream.Client
	loops     *poll.Loops
	pool      *pool.Pool
	listener  *live.Listener // nil without NATS
	clocks    *clocks.Book
	lines     *lines
	live      *export.Live // nil: no collector
	feed      *web.Feed
	kv        *web.KV
	tokens    *proxy.Tokenizers
	keys      *keys.Store // nil: no API keys are configured
	proxy     *proxy.Proxy
	respond   *respond.Responder
	draining  atomic.Bool
	readied   readiness
}

// Run runs the router until ctx ends.
func (o *options) Run(ctx context.Context, log *slog.Logger) error {
	go heapRoom(ctx)
	d := &daemon{o: o, log: log, metrics: serve.NewRegistry()}
	defer d.close()
	var err error
	if d.strangers, err = serve.Limited(log, d.metrics, "meridian_router_limited_log_lines_total"); err != nil {
		return err
	}
	for _, open := range []func(context.Context) error{ // each needs what is before it
		d.openCluster, d.openClock, d.openBus, d.openPool, d.openClocks, d.openLines, d.openKeys, d.openProxy, d.openServer,
	} {
		if err := open(ctx); err != nil {
			return err
		}
	}
	return d.run(ctx)
}

func (d *daemon) openCluster(context.Context) (err error) {
	d.cluster, err = d.o.ClusterFlags.Open()
	return err
}

func (d *daemon) openClock(context.Context) (err error) {
	if d.steady, err = clock.New(clock.Options{}); err != nil {
		return err
	}
	d.respond, err = respond.Listen(d.o.ClockListen, d.steady, respond.Options{Key: d.cluster.Key("clock"), KernelDir: d.o.SharedKernelDir, Logger: d.log})
	return err
}

func (d *daemon) openBus(ctx context.Context) (err error) {
	if err := os.MkdirAll(d.o.Traces, 0o755); err != nil {
		return fmt.Errorf("--traces: %w", err)
	}
	bo := bus.Options{URL: d.o.Nats, Name: d.o.Name, Logger: d.log, Token: d.cluster.Token(), TLS: d.cluster.Client}
	if d.o.EmbeddedNats {
		d.embedded, err = bus.StartEmbedded(bus.EmbeddedOptions{Listen: d.o.NatsListen, StoreDir: d.o.natsStore(), Logger: d.strangers, Token: d.cluster.Token()})
		if err != nil {
			return fmt.Errorf("--embedded-nats at --nats-listen %s, in %s: %w", d.o.NatsListen, d.o.natsStore(), err)
		}
		bo.Server = d.embedded
	}
	if d.embedded == nil && d.o.Nats == "" {
		return nil
	}
	d.conn, err = bus.Connect(ctx, bo)
	return err
}

// transport shows the cluster's secret to the nodes that are registered, and to others who prove that they know it.
func (d *daemon) transport(base *http.Transport) http.RoundTripper {
	return d.cluster.Transport(base, func(host string) bool { return d.registry.Has(host) })
}

func (d *daemon) openPool(context.Context) (err error) {
	index := prefix.New(0)
	o := pool.Options{LocalMax: d.o.LocalPrefill, Qualify: d.o.Qualify != "none", TrustForeign: d.o.Qualify == "own", Index: index, Static: d.o.statics(), Now: d.steady.Now, Logger: d.log}
	o.CtxPolicy, o.GenPolicy = d.o.policies()
	o.Client = &http.Client{Transport: d.transport(&http.Transport{MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute}), CheckRedirect: pool.NoRedirect}
	o.Ours = d.cluster.Ours
	if d.conn != nil {
		o.BusUp = d.conn.Connected
	} else if len(o.Static) == 0 {
		d.log.Warn("no --nats, no --embedded-nats, no --ctx and no --gen: this router will never have a worker")
	}
	if d.pool, err = pool.New(o); err != nil {
		return err
	}
	d.kv = web.NewKV(d.nodeURLs, o.Client)
	if err := d.metrics.Register(d.pool.Metrics()); err != nil {
		return fmt.Errorf("register metrics of the pool: %w", err)
	}
	if d.conn != nil {
		d.registry = node.NewRegistry(d.conn, d.strangers, d.pool.Apply)
		d.listener = live.New(live.Options{
			Router: d.o.Name, Epoch: func() string { return string(d.steady.ID()) }, Conn: d.conn, Pool: d.pool, Index: index, Client: o.Client, Logger: d.strangers,
		})
	}
	return nil
}

func (d *daemon) openClocks(context.Context) error {
	o := clocks.Options{
		Name: d.o.Name, Steady: d.steady, Conn: d.conn, Static: d.pool.Static, KernelDir: d.o.SharedKernelDir, Logger: d.log,
		Key: d.cluster.Key("clock"), Transport: d.transport,
	}
	if d.registry != nil {
		o.Members = d.registry.Nodes
	}
	d.clocks = clocks.New(o)
	if err := d.metrics.Register(d.clocks); err != nil {
		return fmt.Errorf("register clock metrics: %w", err)
	}
	return nil
}

func (d *daemon) openKeys(context.Context) (err error) {
	if d.o.APIKeys == "" {
		d.log.Warn("no --api-keys: everybody who reaches this router may use it and see what it does", "listen", d.o.Listen)
		return nil
	}
	if d.keys, err = keys.Open(d.o.APIKeys, d.log); err != nil {
		return err
	}
	d.metrics.MustRegister(d.keys.Metrics())
	return nil
}

func (d *daemon) runKeys(ctx context.Context) error {
	if d.keys == nil {
		return nil
	}
	return d.keys.Run(ctx)
}

func (d *daemon) openProxy(context.Context) (err error) {
	d.client = upstream.New(upstream.Options{TLS: d.cluster.Client, Authorization: d.cluster.Authorization()})
	d.loops = poll.NewLoops(max(1, runtime.GOMAXPROCS(0)/processorsPerLoop))
	d.tokens = &proxy.Tokenizers{Pool: d.pool, Client: d.client, Build: proxy.BuildTokenizer}
	d.proxy, err = proxy.New(proxy.Options{
		Name: d.o.Name, Pool: d.pool, Client: d.client, Loops: d.loops, Steady: d.steady, Schedule: d.o.Schedule,
		Tokenizers: d.tokens, Keys: d.keys,
		Record: d.lines.add, Begin: d.lines.collector.Begin, Expect: d.lines.collector.Expect, Timelines: d.lines.reader(), Estimate: d.clocks.Newest, Exchange: d.clocks.Exchange, Metrics: d.metrics, Logger: d.log,
		NoBus: d.conn == nil, MaxBody: int(d.o.MaxBody), MaxBodies: int64(d.o.MaxBodies), Timeout: d.o.Timeout, ClientIdle: d.o.ClientIdle,
		MaxRunning: d.o.MaxRunning, Queue: d.o.Queue, QueueTime: d.o.QueueTime, Hedge: d.o.Hedge,
	})
	return err
}

// processorsPerLoop: a loop that has much to do is cheap, since much comes with each wake-up, and one keeps up with what three
// others bring in and merge.
const processorsPerLoop = 4

func (d *daemon) openServer(context.Context) (err error) {
	tls, err := d.o.TLSFlags.Config()
	if err != nil {
		return err
	}
	d.server, err = serve.New(serve.Options{
		Listen: d.o.Listen, Logger: d.log, Registry: d.metrics, Grace: d.o.Grace, Ready: d.ready, Allow: d.proxy.Allow,
		TLS: tls, MaxConns: d.o.MaxConns,
	})
	if err != nil {
		return err
	}
	d.proxy.Routes(d.server.Echo())
	return web.Routes(d.server.Echo(), web.Options{
		Feed: d.feed, KV: d.kv, Cluster: func() any { return d.proxy.Cluster() }, Draining: d.draining.Load,
	})
}

// ready tells whether this router should get requests.
func (d *daemon) ready() error {
	return d.readied.check(d.steady.Now(), d.proxy.Ready(), func() []proxy.ClusterNode { return d.proxy.Cluster().Nodes })
}

// drainNotice is how long the router still accepts after it has said that it drains.
const drainNotice = 200 * time.Millisecond

// run serves until ctx ends, then ends in order: no new requests, the running ones end; then the timelines are complete
// and written; then what they needed (clocks, membership, NATS) is closed.
func (d *daemon) run(ctx context.Context) error {
	base := context.WithoutCancel(ctx)
	inner, stop := context.WithCancel(base)
	defer stop()
	beside, watched := errgroup.WithContext(inner)
	for _, f := range []func(context.Context) error{d.respond.Serve, d.pool.Run, d.clocks.Run, d.runRegistry, d.tokens.Run, d.runKeys, d.feed.Run, d.kv.Run, d.listen, d.runProbes, d.runRows} {
		beside.Go(func() error { return f(inner) })
	}
	linesCtx, endLines := context.WithCancel(base)
	defer endLines()
	linesDone := make(chan error, 1)
	go func() { linesDone <- d.lines.run(linesCtx) }()
	lease, err := d.register(ctx)
	if err != nil {
		stop()
		return errors.Join(err, beside.Wait())
	}
	serving, quit := context.WithCancel(base)
	defer quit()
	served := make(chan error, 1)
	go func() { served <- d.server.Serve(serving) }()
	d.log.Info("serving", "router", d.o.Name, "listen", d.server.Addr(), "traces", d.o.Traces, "nats", d.natsURL(), "clock_id", d.steady.ID())
	var fault error
	select {
	case <-ctx.Done():
		d.log.Info("draining", "router", d.o.Name, "grace", d.o.Grace)
	case <-watched.Done():
	case fault = <-linesDone:
		linesDone <- fault
	case err := <-served:
		served <- err
	}
	d.draining.Store(true)
	if lease != nil {
		lease.Changed()
		pause(watched, drainNotice)
	}
	quit()
	fault = errors.Join(fault, <-served)
	endLines()
	fault = errors.Join(fault, <-linesDone)
	if lease != nil {
		lease.Close()
	}
	stop()
	return errors.Join(fault, beside.Wait())
}

func (d *daemon) listen(ctx context.Context) error {
	if d.listener == nil {
		return nil
	}
	return d.listener.Run(ctx)
}

func (d *daemon) runProbes(ctx context.Context) error {
	return qualify.New(qualify.Options{
		Router: d.o.Name, Pool: d.pool, Client: d.client, Now: d.steady.Now, NextID: d.proxy.NextID, Schedule: d.proxy.Serves,
	}).Run(ctx)
}

func (d *daemon) runRegistry(ctx context.Context) error {
	if d.registry == nil {
		return nil
	}
	return d.registry.Run(ctx)
}

func (d *daemon) natsURL() string {
	if d.embedded != nil {
		return d.embedded.URL()
	}
	return d.o.Nats
}

func pause(ctx context.Context, t time.Duration) {
	timer := time.NewTimer(t)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// register tells others of this router, so that clocksync measures its clock.
func (d *daemon) register(ctx context.Context) (*node.Lease, error) {
	if d.conn == nil {
		return nil, nil
	}
	host, port, err := advertised(d.o.Advertise, d.server.Addr())
	if err != nil {
		return nil, err
	}
	info := node.Info{
		Name: d.o.Name, Role: node.RoleRouter, URL: scheme(d.o.TLSCert) + net.JoinHostPort(host, port), ClockAddr: d.respond.Advertised(host),
		PID: os.Getpid(), State: node.Ready, Version: serve.Version(),
	}
	return node.Register(ctx, d.conn, func() node.Info {
		i := info
		i.ClockID = d.steady.ID() // changes when the machine was suspended
		if d.draining.Load() {
			i.State = node.Draining
		}
		return i
	}, d.log)
}

func scheme(cert string) string {
	if cert != "" {
		return "https://"
	}
	return "http://"
}

// close closes what open has opened, in the reverse order.
func (d *daemon) close() {
	if d.loops != nil {
		_ = d.loops.Close() // nobody streams any more
	}
	if d.client != nil {
		d.client.Close()
	}
	if d.conn != nil {
		d.conn.Close()
	}
	if d.embedded != nil {
		d.embedded.Close()
	}
}
