package worker

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/hardware"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/ledger"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/serve"
)

// Daemon is a node's process around its engine: clock, bus, records, HTTP listener, registration, and the order of their
// end. Open makes it; the caller then opens the device and calls Run.
type Daemon struct {
	Name      string
	Steady    *clock.Steady
	Adjusted  *clock.Adjusted
	Bus       *bus.Conn // nil without --nats
	Metrics   *prometheus.Registry
	Strangers *slog.Logger   // for what others can make this process write
	Ledger    *ledger.Ledger // of the engine: Start it when the engine is known
	Hardware  *hardware.Sampler
	Host      string // that others dial
	URL       string
	Cluster   *serve.Cluster // credentials of the cluster's components

	flags   Flags
	role    phase.Role
	log     *slog.Logger
	server  *serve.Server
	records *bus.Publisher
	cache   *kvevent.Log
	ready   atomic.Bool
	lost    atomic.Pointer[error] // the engine ended by itself
	closing sync.Once
}

// Open makes everything that needs no device. The listener is open from here on, so that a port that is taken is told
// before a large model is loaded; requests wait.
func Open(ctx context.Context, f Flags, listen string, role phase.Role, log *slog.Logger) (_ *Daemon, err error) {
	if err := f.Validate(); err != nil {
		return nil, err
	}
	d := &Daemon{Name: f.nameOf(role), flags: f, role: role, log: log, Metrics: serve.NewRegistry()}
	if d.Steady, err = clock.New(f.Clock.Options()); err != nil {
		return nil, err
	}
	if d.Steady.Faulty() {
		log.Warn("test mode: this node's clock is wrong on purpose", "node", d.Name)
	}
	if d.Strangers, err = serve.Limited(log, d.Metrics, "meridian_limited_log_lines_total"); err != nil {
		return nil, err
	}
	d.Adjusted = clock.NewAdjusted(d.Steady)
	if d.Cluster, err = f.ClusterFlags.Open(); err != nil {
		return nil, err
	}
	if d.Cluster.TakesAll() {
		log.Warn("no --cluster-token and no --cluster-cert: everybody who reaches this node may use and change it", "node", d.Name, "listen", listen)
	}
	defer func() {
		if err != nil {
			d.Close(ctx)
		}
	}()
	d.server, err = serve.New(serve.Options{
		Listen: listen, Logger: log, Registry: d.Metrics, Grace: f.Grace, Healthy: d.healthy, Ready: d.isReady,
		Allow: d.Cluster.Allow, TLS: d.Cluster.Server, BodyTime: bodyTime,
	})
	if err != nil {
		return nil, err
	}
	if err := d.openLedgers(); err != nil {
		return nil, err
	}
	h, err := advertised(f.Advertise, d.server.Addr())
	if err != nil {
		return nil, err
	}
	d.Host, d.URL = h.host, d.Cluster.Scheme()+"://"+h.http
	if err := d.connect(ctx); err != nil {
		return nil, err
	}
	d.follow()
	return d, nil
}

// nameOf is the name of the node.
func (f *Flags) nameOf(role phase.Role) string {
	if f.Name != "" {
		return f.Name
	}
	return string(role) + "-" + hostLabel()
}

func hostLabel() string {
	name, err := os.Hostname()
	if err != nil || name == "" {
		return "localhost"
	}
	return name
}

// connect opens the bus and the spool; without --nats there is neither.
func (d *Daemon) connect(ctx context.Context) error {
	if d.flags.NATS == "" {
		d.log.Warn("no --nats: this node is not registered and keeps no records", "node", d.Name)
		return nil
	}
	var err error
	if d.Bus, err = bus.Connect(ctx, bus.Options{URL: d.flags.NATS, Name: string(d.role) + "." + d.Name, Logger: d.log, Token: d.Cluster.Token(), TLS: d.Cluster.Client}); err != nil {
		return fmt.Errorf("--nats: %w", err)
	}
	spool := d.flags.Spool
	if spool == "" {
		spool = bus.DefaultSpoolDir(d.Name, d.flags.NATS)
	}
	if d.records, err = bus.NewPublisher(d.Bus, bus.PublisherOptions{SpoolDir: spool, Logger: d.log}); err != nil {
		return fmt.Errorf("--spool %q: %w", spool, err)
	}
	if err := d.records.Register(d.Metrics); err != nil {
		return fmt.Errorf("register metrics of the spool: %w", err)
	}
	return nil
}

func (d *Daemon) healthy() error {
	if e := d.lost.Load(); e != nil {
		return *e
	}
	return nil
}

var errLoading = errors.New("worker: the model is being loaded")

func (d *Daemon) isReady() error {
	if !d.ready.Load() {
		return errLoading
	}
	return d.healthy()
}

// Publish stores a record; nil without --nats.
func (d *Daemon) publisher() func(*phase.Record, *infer.StepRecords) error {
	if d.records == nil {
		return nil
	}
	return d.records.PublishWithSteps
}

// flushWait is how long the records of the last requests may take to reach NATS. What does not is in the spool, and is
// sent by the next process.
const flushWait = 2 * time.Second

// Close ends what Open made: records before the bus that carries them. After Run, which does so itself, it does nothing.
func (d *Daemon) Close(ctx context.Context) {
	d.closing.Do(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushWait)
		defer cancel()
		if d.records != nil {
			if err := d.records.Close(ctx); err != nil {
				d.log.Warn("records stay in the spool", "error", err)
			}
		}
		if d.Bus != nil {
			d.Bus.Close()
		}
		if d.server != nil {
			_ = d.server.Close() // closed already, unless it was never served
		}
	})
}

// info is the registry value.
func (d *Daemon) info(p *Parts, state node.State) node.Info {
	load := p.Engine.Load()
	m := p.Face.Model.Model
	i := node.Info{
		Name: d.Name, Role: node.Role(d.role), URL: d.URL, KVAddr: p.Face.KVAddr, ClockAddr: p.ClockAddr, ClockID: d.Steady.ID(),
		PID: os.Getpid(), State: state, Model: &m, Load: &load, Ranks: ofRanks(p.Engine), Stages: p.Stages, Styles: []string{"aggregated"}, Version: serve.Version(),
	}
	if p.Face.Context != nil || p.Face.Generation != nil {
		i.Styles = append(i.Styles, "generation_first", "context_first")
	}
	return i
}

// Routes is where a role adds routes of its own, before Run.
func (d *Daemon) Routes() *echo.Echo { return d.server.Echo() }
