package decode

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"slices"

	"meridian.internal/clocksync/rankclock"
	"meridian.internal/clocksync/respond"
	"meridian.internal/gpu/device"
	"meridian.internal/gpu/kvwire"
	"meridian.internal/shared/ledger"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/serve"
	"meridian.internal/shared/worker"
)

// CLI are the options of gennode.
type CLI struct {
	Listen       string   `help:"HTTP address." default:":8201" placeholder:"HOST:PORT"`
	KVListen     string   `help:"TCP address at which other generation nodes fetch what is cached here. Open to everybody who reaches it, unless --cluster-token or --cluster-cert is given." default:":0" name:"kv-listen" placeholder:"HOST:PORT"`
	KVPeer       []string `help:"KV listener of a context node that is not in the registry; may be given several times." name:"kv-peer" placeholder:"HOST:PORT"`
	worker.Flags `embed:""`
	Device       device.Options `embed:""`
}

// Main runs gennode and gives its exit code.
func Main() int {
	return serve.Run("gennode", &CLI{}, serve.About("Generation node of Meridian: takes over the KV of prompts and generates tokens."),
		serve.WithHealthcheck("http://127.0.0.1:8201/healthz"))
}

// Run serves until ctx ends.
func (c *CLI) Run(ctx context.Context, log *slog.Logger) error {
	if err := c.Device.Validate(); err != nil {
		return err
	}
	for _, peer := range c.KVPeer {
		if _, _, err := net.SplitHostPort(peer); err != nil {
			return fmt.Errorf("--kv-peer %q: want host:port, as the context node's --kv-listen is reached: %w", peer, err)
		}
	}
	if c.Device.Rank > 0 {
		return c.rank(ctx, log.With("rank", c.Device.Rank))
	}
	d, err := worker.Open(ctx, c.Flags, c.Listen, phase.Gen, log)
	if err != nil {
		return err
	}
	defer d.Close(ctx)
	ln, err := net.Listen("tcp", c.KVListen) // before the model is loaded, which may take long
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
	return worker.RunRank(ctx, worker.RankOptions{Flags: c.Flags, Role: phase.Gen, GPUs: c.Device.WatchGPU, Logger: log}, func(ctx context.Context, r *worker.Rank) error {
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
	ko := kvwire.ClientOptions{
		Hello: kvwire.HelloOf(d.Name, string(d.Steady.ID()), dev.Info, dev.Engine.Ranks()), Epoch: uint64(instance), Now: d.Steady.Now, Logger: d.Strangers,
		Key: d.Cluster.Key("kv"), Buffers: dev.Buffers(),
	}
	if t := d.Cluster.Client; t != nil {
		ko.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			return (&tls.Dialer{Config: t}).DialContext(ctx, "tcp", addr)
		}
	}
	if s := dev.Sharer(); s != nil {
		if shared, ok := s.Share(); ok {
			ko.Hello.Shares, ko.Attach = shared.Kind, s.Attach
		}
	}
	client := kvwire.NewClient(ko)
	defer client.Close()
	_, port, err := net.SplitHostPort(ln.Addr().String())
	if err != nil {
		return err
	}
	server := kvwire.NewServer(kvwire.ServerOptions{
		Hello: kvwire.HelloOf(d.Name, string(d.Steady.ID()), dev.Info, dev.Engine.Ranks()), Epoch: ko.Epoch, Blocks: dev.Info.KVBlocks, Now: d.Steady.Now, Logger: d.Strangers,
		Key: ko.Key, Lend: dev.Lend, Buffers: ko.Buffers,
	})
	beside := []func(context.Context) error{clockUDP.Serve, func(ctx context.Context) error { return server.Serve(ctx, ln) }}
	var registry *node.Registry
	if d.Bus != nil {
		registry = node.NewRegistry(d.Bus, d.Strangers, nil)
		beside = append(beside, registry.Run)
	}
	g := &Decoder{Engine: dev.Engine, Client: client, EOS: dev.Model.Config.EOS, Vocab: dev.Info.Vocab, Now: d.Steady.Now, Logger: log, PerBlock: dev.Info.TokensPerBlock, Knows: func(addr string) bool {
		return slices.Contains(c.KVPeer, addr) || registered(registry, addr)
	}}
	d.Routes().PUT("/kv/:id", g.move)
	return d.Run(ctx, worker.Parts{
		Face: worker.Options{
			Model: modelOf(dev, c.Device.MaxBatchSize*dev.Engine.Ranks()), Tokenizer: dev.Tokenizer, Kind: device.Kind, CardClocks: dev.CardClocks, RankClock: clocks.Newest,
			Aggregated: g.Aggregated, Generation: g.Generation, KVAddr: net.JoinHostPort(d.Host, port),
		},
		Engine: dev.Engine, Stages: dev.Info.Stages, ClockAddr: clockUDP.Advertised(d.Host), Beside: beside,
	})
}

// registered tells whether a node that lives has this KV listener.
func registered(r *node.Registry, addr string) bool {
	return r != nil && slices.ContainsFunc(r.Nodes(), func(e node.Entry) bool {
		return e.Alive && e.Info.KVAddr == addr
	})
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
