package prefill

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/clocksync/rankclock"
	"meridian.internal/clocksync/respond"
	"meridian.internal/gpu/device"
	"meridian.internal/gpu/kvwire"
	"meridian.internal/shared/api"
	"meridian.internal/shared/ledger"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/serve"
	"meridian.internal/shared/worker"
)

// CLI are the options of ctxnode.
type CLI struct {
	Listen       string        `help:"HTTP address." default:":8101" placeholder:"HOST:PORT"`
	KVListen     string        `help:"TCP address at which generation nodes fetch KV. Open to everybody who reaches it, unless --cluster-token or --cluster-cert is given." default:":0" name:"kv-listen" placeholder:"HOST:PORT"`
	KVLease      time.Duration `help:"Time in which a generation node must ask for the KV of a finished prefill." default:"5s" name:"kv-lease"`
	worker.Flags `embed:""`
	Device       device.Options `embed:""`
}

// Main runs ctxnode and gives its exit code.
func Main() int {
	return serve.Run("ctxnode", &CLI{}, serve.About("Context node of Meridian: computes the KV of prompts and hands it to generation nodes."),
		serve.WithHealthcheck("http://127.0.0.1:8101/healthz"))
}

// Run serves until ctx ends.
func (c *CLI) Run(ctx context.Context, log *slog.Logger) error {
	if err := c.Device.Validate(); err != nil {
		return err
	}
	if c.Device.Rank > 0 {
		return c.rank(ctx, log.With("rank", c.Device.Rank))
	}
	d, err := worker.Open(ctx, c.Flags, c.Listen, phase.Ctx, log)
	if err != nil {
		return err
	}
	defer d.Close(ctx)
	ln, err := net.Listen("tcp", c.KVListen)
	if err != nil {
		return fmt.Errorf("--kv-listen %q: %w", c.KVListen, err)
	}
	defer func() { _ = ln.Close() }() // closed already, if it was served
	if t := d.Cluster.KVServer(); t != nil {
		ln = tls.NewListener(ln, t)
	}
	c.Device.ClockID, c.Device.Sink = d.Steady.ID(), d.Ledger.Sink()
	c.Device.KVEvents, c.Device.KVEpoch = d.KVEvents()
	dev, err := device.Open(ctx, c.Device, d.Steady.Now, log)
	if err != nil {
		return err
	}
	defer func() {
		if err := dev.Close(); err != nil {
			log.Warn("close the device", "error", err)
		}
	}()
	return c.serve(ctx, d, dev, ln, log)
}

// rank runs a rank of this node that is a process of its own.
func (c *CLI) rank(ctx context.Context, log *slog.Logger) error {
	return worker.RunRank(ctx, worker.RankOptions{Flags: c.Flags, Role: phase.Ctx, GPUs: c.Device.WatchGPU, Logger: log}, func(ctx context.Context, r *worker.Rank) error {
		c.Device.Sink = r.Sink
		o := rankclock.Options{Steady: r.Steady, Key: r.Cluster.Key("clock"), KernelDir: c.SharedKernelDir, Logger: log}
		return rankclock.Serve(ctx, o, func(addr string) error {
			return device.ServeRank(ctx, c.Device, r.Steady, addr, log)
		})
	})
}

func (c *CLI) serve(ctx context.Context, d *worker.Daemon, dev *device.Device, ln net.Listener, log *slog.Logger) error {
	d.Hardware.Watch(c.Device.WatchGPU)
	if err := d.Ledger.Start(ledgerOf(d, dev)); err != nil {
		return err
	}
	clocks, err := rankclock.Follow(ctx, rankclock.Options{Steady: d.Steady, Key: d.Cluster.Key("clock"), KernelDir: c.SharedKernelDir, Logger: log}, dev.RankClocks())
	if err != nil {
		return err
	}
	defer clocks.Close()
	clockUDP, err := respond.Listen(c.ClockListen, d.Steady, respond.Options{Key: d.Cluster.Key("clock"), KernelDir: c.SharedKernelDir, Logger: log})
	if err != nil {
		return fmt.Errorf("--clock-listen: %w", err)
	}
	_, instance, err := d.Steady.ID().Words()
	if err != nil {
		return err
	}
	so := kvwire.ServerOptions{
		Hello: kvwire.HelloOf(d.Name, string(d.Steady.ID()), dev.Info, dev.Engine.Ranks()), Epoch: uint64(instance), Lease: c.KVLease, Blocks: dev.Info.KVBlocks * dev.Engine.Ranks(),
		Now: d.Steady.Now, Logger: d.Strangers, Key: d.Cluster.Key("kv"), Lend: dev.Lend, Buffers: dev.Buffers(),
	}
	if s := dev.Sharer(); s != nil {
		if shared, ok := s.Share(); ok {
			so.Shared = &shared
		}
	}
	server := kvwire.NewServer(so)
	_, port, err := net.SplitHostPort(ln.Addr().String())
	if err != nil {
		return err
	}
	p := &Prefiller{Engine: dev.Engine, Server: server, Endpoint: net.JoinHostPort(d.Host, port)}
	d.Routes().DELETE("/kv/:id", p.release)
	return d.Run(ctx, worker.Parts{
		Face: worker.Options{
			Model: modelOf(dev, c.Device.MaxBatchSize*dev.Engine.Ranks()), Tokenizer: dev.Tokenizer, Kind: device.Kind, CardClocks: dev.CardClocks, RankClock: clocks.Newest,
			Aggregated: p.Aggregated, Context: p.Context, KVAddr: p.Endpoint,
		},
		Engine: dev.Engine, Stages: dev.Info.Stages, ClockAddr: clockUDP.Advertised(d.Host),
		Beside: []func(context.Context) error{clockUDP.Serve, func(ctx context.Context) error { return server.Serve(ctx, ln) }},
	})
}

// release ends a lease that no generation leg will claim, because its client has gone: DELETE /kv/{disagg_request_id}.
func (p *Prefiller) release(c echo.Context) error {
	id, err := strconv.ParseInt(c.Param("id"), 10, 64)
	if err != nil {
		return api.Invalid("id", "kv id %q: want a whole number", c.Param("id"))
	}
	if !p.Server.Withdraw(id) {
		return &api.Error{Code: http.StatusNotFound, Type: api.TypeNotFound, Stage: "kv", Message: fmt.Sprintf("request %d has no lease here", id)}
	}
	return c.NoContent(http.StatusNoContent)
}

// ledgerOf describes the engine to its ledger.
func ledgerOf(d *worker.Daemon, dev *device.Device) ledger.Engine {
	return ledger.Engine{
		Static: dev.Static(d.Name, string(d.Steady.ID())), Model: dev.Name, Device: dev.Info.Device,
		PrefixReuse: dev.Engine.Config().PrefixReuse, Ranks: dev.Engine.Ranks(), Stages: dev.Info.Stages, Blocks: dev.Info.KVBlocks, Load: dev.Engine.Load,
	}
}

func modelOf(dev *device.Device, batch int) worker.Model {
	m := worker.Model{
		Vocab: dev.Info.Vocab, EOS: dev.Model.Config.EOS, TokenizerJSON: dev.Model.TokenizerJSON,
		ConfigJSON: dev.Model.TokenizerConfigJSON, ChatTemplate: dev.Model.ChatTemplate,
	}
	m.Name, m.Hash, m.ContextLen = dev.Name, dev.Info.ModelHash, dev.Info.ContextLen
	m.TokensPerBlock, m.Numerics, m.MaxBatchSize = dev.Info.TokensPerBlock, dev.Info.Numerics, batch
	return m
}
