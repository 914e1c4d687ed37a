package prefill

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/gpu/device"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/node"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/worker"
)

func cli(nats, spool string) *CLI {
	return &CLI{
		Listen: "127.0.0.1:0", KVListen: "127.0.0.1:0", KVLease: time.Second,
		Flags: worker.Flags{Name: "ctx0", NATS: nats, Spool: spool, Grace: 5 * time.Second, LedgerFlags: worker.LedgerFlags{IterStatsInterval: 1, IterStatsMax: 10}},
		Device: device.Options{Device: "sim", MaxNumTokens: 64, MaxBatchSize: 8, MaxWaiting: 64, TokensPerBlock: 16, Ranks: 1, PP: 1,
			Overlap: true, PrefixReuse: true, Sim: device.Sim{Step: time.Millisecond}},
	}
}

func TestANodeRegistersServesRecordsAndLeaves(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	embedded, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: "127.0.0.1:0", StoreDir: t.TempDir()})
	if err != nil {
		t.Skip("no loopback network: " + err.Error())
	}
	defer embedded.Close()
	watch, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	conn, err := bus.Connect(watch, bus.Options{URL: embedded.URL(), Name: "test", Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	events := make(chan node.Event, 64)
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		_ = node.Watch(watch, conn, func(e node.Event) { events <- e })
	}()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- cli(embedded.URL(), t.TempDir()).Run(ctx, log) }()

	info := await(watch, t, events, func(e node.Event) bool { return e.Info.State == node.Ready })
	if info.Role != node.RoleCtx || info.KVAddr == "" || info.ClockAddr == "" || info.Model == nil || info.Model.Name != "meridian-tiny" || info.Load == nil {
		t.Errorf("registered as %+v", info)
	}
	resp, err := http.Post(info.URL+"/v1/completions", "application/json", strings.NewReader(`{"model":"meridian-tiny","prompt":"a b c","max_tokens":4,"ignore_eos":true}`))
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK || !strings.Contains(string(body), `"completion_tokens":4`) {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("the node ended with %v", err)
	}
	await(watch, t, events, func(e node.Event) bool { return e.Info.State == node.Draining })
	rec := firstRecord(watch, t, conn)
	if rec.Outcome != phase.Finished || rec.Role != phase.Ctx || rec.Tokens.Output != 4 || rec.Style != "aggregated" || rec.Stamps.FirstScheduledNS == nil {
		t.Errorf("record %+v", rec)
	}
	cancel()
	<-watching
}

func await(ctx context.Context, t *testing.T, events <-chan node.Event, want func(node.Event) bool) node.Info {
	t.Helper()
	for {
		select {
		case e := <-events:
			if want(e) {
				return e.Info
			}
		case <-ctx.Done():
			t.Fatal("the registry did not say what was waited for")
		}
	}
}

func firstRecord(ctx context.Context, t *testing.T, conn *bus.Conn) *phase.Record {
	t.Helper()
	c, err := conn.JetStream().CreateConsumer(ctx, bus.StreamPhases, jetstream.ConsumerConfig{FilterSubject: bus.RouterSubjects(bus.NoRouter)})
	if err != nil {
		t.Fatal(err)
	}
	m, err := c.Next(jetstream.FetchMaxWait(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	rec, err := phase.Parse(m.Data())
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

func TestOptionsAreRefusedBeforeAnythingIsOpened(t *testing.T) {
	for _, c := range []struct {
		want string
		edit func(*CLI)
	}{
		{"--ranks 65", func(c *CLI) { c.Device.Ranks = 65 }},
		{"--listen", func(c *CLI) { c.Listen = "nowhere" }},
		{"--kv-listen", func(c *CLI) { c.KVListen = "nowhere" }},
		{"--clock-listen", func(c *CLI) { c.ClockListen = "nowhere:x" }},
		{"--grace", func(c *CLI) { c.Grace = -1 }},
		{"--name", func(c *CLI) { c.Name = "a b" }},
		{"--nats", func(c *CLI) { c.NATS = "nonsense" }},
		{"--advertise", func(c *CLI) { c.Advertise = "a/b" }},
		{"--iter-stats-interval", func(c *CLI) { c.IterStatsInterval = -1 }},
		{"--model", func(c *CLI) { c.Device.Model = "/no/such/folder" }},
	} {
		o := cli("", "")
		c.edit(o)
		if err := o.Run(t.Context(), slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}
}

func TestTheNodeImportsNoOtherRole(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../...").Output()
	if err != nil {
		t.Skip("the go command does not run: " + err.Error())
	}
	for line := range strings.Lines(string(out)) {
		for _, bad := range []string{"meridian.internal/router", "meridian.internal/gennode", "meridian.internal/e2e"} {
			if strings.HasPrefix(line, bad) {
				t.Errorf("ctxnode depends on %s", strings.TrimSpace(line))
			}
		}
	}
}
