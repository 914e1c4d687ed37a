package collect

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

var quiet = slog.New(slog.DiscardHandler)

const kernel = "00000000000000aa."

// rec is a record of request id; all processes share a kernel.
func rec(role phase.Role, id string) *phase.Record {
	instance := map[phase.Role]clock.ID{phase.Disagg: kernel + "00000001", phase.Ctx: kernel + "00000002", phase.Gen: kernel + "00000003"}[role]
	node := map[phase.Role]string{phase.Disagg: "r0", phase.Ctx: "ctx0", phase.Gen: "gen0"}[role]
	at := func(ms int64) *int64 { v := (1000 + ms) * 1e6; return &v }
	r := &phase.Record{
		Schema: phase.Schema, Role: role, Node: node, Instance: instance, Router: "r0", RequestID: id, ClientRequestID: "client-" + id, Style: "generation_first",
		Model: "tiny", Outcome: phase.Finished, Clocks: []phase.Clock{{ID: instance, Kind: "mono"}},
		Stamps: phase.Stamps{ReceiveNS: at(1), ParsedNS: at(2), EndNS: at(20), FirstTokenNS: at(10)},
	}
	if role == phase.Disagg {
		r.Stamps = phase.Stamps{ReceiveNS: at(0), ParsedNS: at(1), PlacedNS: at(1), GenDispatchNS: at(1), GenHeadersNS: at(3), CtxDispatchNS: at(3), FirstTokenNS: at(12), LastTokenNS: at(20), EndNS: at(21)}
		r.Decision = &phase.Decision{Ctx: "ctx0", Gen: "gen0"}
	}
	return r
}

// fakeAck notes whether its line was on disk when it was acknowledged.
type fakeAck struct {
	mu     sync.Mutex
	dir    string
	acked  int
	onDisk int // lines on disk at the acknowledgement
	alive  int
}

func (a *fakeAck) Ack() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.acked++
	a.onDisk = len(readDir(a.dir))
	return nil
}

// seen is how often it was acknowledged.
func (a *fakeAck) seen() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.acked
}

func (a *fakeAck) InProgress() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.alive++
	return nil
}

// readDir returns all lines of a folder, amendments included.
func readDir(dir string) (out []*timeline.Line) {
	for _, pattern := range []string{"timeline-*.jsonl", "timeline-*.amend.ndjson"} {
		names, _ := filepath.Glob(filepath.Join(dir, pattern))
		for _, n := range names {
			jsonl.Read(n, func(b []byte, _ int, _ int64) error {
				l, err := timeline.Parse(b)
				if err == nil {
					out = append(out, l)
				}
				return err
			}, func(int, error) {})
		}
	}
	return out
}

// shape is "id complete amends missing" of each line.
func shape(lines []*timeline.Line) (out []string) {
	for _, l := range lines {
		s := l.RequestID
		if l.Complete {
			s += " complete"
		}
		if l.Amends {
			s += " amends"
		}
		for _, m := range l.Missing {
			s += " -" + m
		}
		out = append(out, s)
	}
	return out
}

// start runs a collector without a bus inside a bubble; stop ends it.
func start(t *testing.T, o Options) (c *Collector, stop func()) {
	t.Helper()
	o.Router, o.Logger, o.Registry = "r0", quiet, prometheus.NewRegistry()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	return c, func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestWhenALineIsWritten(t *testing.T) {
	const ctx0, gen0 = " -ctx ctx0 sub 0 attempt 0", " -gen gen0 sub 0 attempt 0"
	type step struct {
		wait time.Duration
		rec  *phase.Record
	}
	cases := []struct {
		name  string
		steps []step
		after time.Duration
		want  []string
	}{
		{"all three records: at once", []step{{0, rec(phase.Ctx, "a")}, {0, rec(phase.Gen, "a")}, {0, rec(phase.Disagg, "a")}}, 200 * time.Millisecond, []string{"a complete"}},
		{"the router's first: when the last comes", []step{{0, rec(phase.Disagg, "a")}, {0, rec(phase.Gen, "a")}, {time.Second, rec(phase.Ctx, "a")}}, 200 * time.Millisecond, []string{"a complete"}},
		{"one missing: not before the grace time", []step{{0, rec(phase.Disagg, "a")}, {0, rec(phase.Gen, "a")}}, 1900 * time.Millisecond, nil},
		{"one missing: after the grace time", []step{{0, rec(phase.Disagg, "a")}, {0, rec(phase.Gen, "a")}}, 2300 * time.Millisecond, []string{"a" + ctx0}},
		{"a late one amends", []step{{0, rec(phase.Disagg, "a")}, {0, rec(phase.Gen, "a")}, {3 * time.Second, rec(phase.Ctx, "a")}}, 300 * time.Millisecond, []string{"a" + ctx0, "a complete amends"}},
		{"a copy changes nothing", []step{{0, rec(phase.Disagg, "a")}, {0, rec(phase.Gen, "a")}, {0, rec(phase.Gen, "a")}, {0, rec(phase.Ctx, "a")}, {0, rec(phase.Ctx, "a")}, {time.Second, rec(phase.Disagg, "a")}},
			300 * time.Millisecond, []string{"a complete"}},
		{"nodes alone wait for the router", []step{{0, rec(phase.Ctx, "a")}, {0, rec(phase.Gen, "a")}}, 30 * time.Second, nil},
		{"but not for ever", []step{{0, rec(phase.Ctx, "a")}, {0, rec(phase.Gen, "a")}}, 61 * time.Second, []string{"a -disagg"}},
		{"two requests do not mix", []step{{0, rec(phase.Disagg, "a")}, {0, rec(phase.Disagg, "b")}, {0, rec(phase.Ctx, "b")}, {0, rec(phase.Gen, "b")}}, 2300 * time.Millisecond, []string{"b complete", "a" + ctx0 + gen0}},
	}
	for _, k := range cases {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				dir := t.TempDir()
				c, stop := start(t, Options{Dir: dir})
				for _, s := range k.steps {
					time.Sleep(s.wait)
					c.in <- message{rec: s.rec}
				}
				time.Sleep(k.after)
				synctest.Wait()
				if got := shape(readDir(dir)); !slices.Equal(got, k.want) {
					t.Errorf("lines %q, want %q", got, k.want)
				}
				stop()
			})
		})
	}
}

func TestNothingIsAcknowledgedBeforeItsLineIsOnDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		c, stop := start(t, Options{Dir: dir})
		acks := []*fakeAck{{dir: dir}, {dir: dir}, {dir: dir}, {dir: dir}}
		for i, role := range []phase.Role{phase.Ctx, phase.Gen, phase.Gen} {
			c.in <- message{rec: rec(role, "a"), ack: acks[i]}
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		for i, a := range acks[:3] {
			if a.acked != 0 || a.alive == 0 {
				t.Errorf("record %d: acknowledged %d times, kept alive %d times while its line waits", i, a.acked, a.alive)
			}
		}
		c.in <- message{rec: rec(phase.Disagg, "a"), ack: acks[3]}
		time.Sleep(time.Second)
		synctest.Wait()
		for i, a := range acks {
			if a.acked != 1 || a.onDisk != 1 {
				t.Errorf("record %d: acknowledged %d times with %d lines on disk", i, a.acked, a.onDisk)
			}
		}
		stop()
	})
}

func TestARestartDoublesNothingAndAmendsWhatWasIncomplete(t *testing.T) {
	dir := t.TempDir()
	run := func(records ...*phase.Record) {
		synctest.Test(t, func(t *testing.T) {
			c, stop := start(t, Options{Dir: dir})
			for _, r := range records {
				c.in <- message{rec: r}
			}
			time.Sleep(3 * time.Second)
			synctest.Wait()
			stop()
		})
	}
	run(rec(phase.Disagg, "a"), rec(phase.Ctx, "a"), rec(phase.Gen, "a"), rec(phase.Disagg, "b"), rec(phase.Gen, "b"))
	run(rec(phase.Gen, "a"), rec(phase.Ctx, "a"), rec(phase.Disagg, "a"), rec(phase.Disagg, "b"), rec(phase.Ctx, "b"))
	lines := readDir(dir)
	want := []string{"a complete", "b -ctx ctx0 sub 0 attempt 0", "b complete amends"}
	if got := shape(lines); !slices.Equal(got, want) {
		t.Errorf("lines %q, want %q", got, want)
	}
	if n := len(lines[2].Phases); n != 3 {
		t.Errorf("the amendment has %d phases, want 3", n)
	}
}

func TestARequestThatTheRouterWorksOnWaitsAndOneItForgotDoesNot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		c, stop := start(t, Options{Dir: dir})
		c.Begin("long")
		c.in <- message{rec: rec(phase.Ctx, "long")}
		c.in <- message{rec: rec(phase.Ctx, "of a dead router")}
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if got := shape(readDir(dir)); !slices.Equal(got, []string{"of a dead router -disagg"}) {
			t.Errorf("lines %q", got)
		}
		c.in <- message{rec: rec(phase.Gen, "long")}
		if err := c.Add(rec(phase.Disagg, "long")); err != nil {
			t.Error(err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if got := shape(readDir(dir)); len(got) != 2 || got[1] != "long complete" {
			t.Errorf("lines %q", got)
		}
		stop()
	})
}

func TestALongRequestHoldsUpNothingThatCameAfterIt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		c, stop := start(t, Options{Dir: dir})
		c.Begin("long")
		c.in <- message{rec: rec(phase.Ctx, "long")}
		c.in <- message{rec: rec(phase.Ctx, "adopted"), adopted: "r9"}
		for i := range 100 {
			for _, role := range []phase.Role{phase.Ctx, phase.Gen, phase.Disagg} {
				c.in <- message{rec: rec(role, strconv.Itoa(i))}
			}
		}
		time.Sleep(62 * time.Second)
		synctest.Wait()
		if got := shape(readDir(dir)); len(got) != 101 || got[100] != "adopted -disagg" {
			t.Errorf("%d lines, the last %q", len(got), got[len(got)-1])
		}
		if n := len(c.order.items); n != 1 {
			t.Errorf("%d requests are remembered, one is open", n)
		}
		stop()
	})
}

func TestAFloodIsShedOldestFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		c, stop := start(t, Options{Dir: dir, MaxOpen: 10})
		for i := range 30 {
			c.in <- message{rec: rec(phase.Ctx, fmt.Sprintf("r%02d", i))}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if got := readDir(dir); len(got) != 20 || got[0].RequestID != "r00" || got[19].RequestID != "r19" {
			t.Errorf("%d lines: %q", len(got), shape(got))
		}
		stop()
	})
}

func TestProbesHaveNoLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		c, stop := start(t, Options{Dir: dir})
		r, a := rec(phase.Disagg, "p"), &fakeAck{dir: dir}
		r.Probe = true
		c.in <- message{rec: r, ack: a}
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if got := readDir(dir); len(got) != 0 || a.acked != 1 {
			t.Errorf("lines %q, acknowledged %d times", shape(got), a.acked)
		}
		stop()
	})
}

func TestStepsJoinTheirRecord(t *testing.T) {
	cases := []struct {
		name      string
		genAfter  time.Duration // when gen's record comes, and its steps after it
		stepAfter time.Duration
		want      []string
	}{
		{"within the grace time", 0, time.Second, []string{"a complete"}},
		{"after the grace time they amend", 0, 3 * time.Second, []string{"a -steps of gen gen0 sub 0 attempt 0", "a complete amends"}},
		{"after their record, which is late too", 3 * time.Second, time.Second, []string{"a -gen gen0 sub 0 attempt 0", "a amends -steps of gen gen0 sub 0 attempt 0", "a complete amends"}},
		{"before their record, which is late", 3 * time.Second, -time.Second, []string{"a -gen gen0 sub 0 attempt 0", "a complete amends"}},
	}
	for _, k := range cases {
		t.Run(k.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				gen := rec(phase.Gen, "a")
				var page infer.StepPage
				page.Append(infer.StepRow{Iter: 1, ForwardStartNS: 1, ForwardEndNS: 1, SampleEndNS: 1, TokenNS: 1, BatchSize: 2})
				page.Runs = []infer.StepRun{{N: 1, Step: 1, KVTokens: 7, Tokens: 1}}
				steps := &infer.StepRecords{N: 1, Pages: []infer.StepPage{page}}
				msgs := phase.AppendSteps(gen, steps)
				gen.StepMessages = len(msgs)
				h, s, err := phase.ParseSteps(msgs[0])
				if err != nil {
					t.Fatal(err)
				}
				dir := t.TempDir()
				c, stop := start(t, Options{Dir: dir})
				later := func(d time.Duration, m message) { time.AfterFunc(d, func() { c.in <- m }) }
				later(0, message{rec: rec(phase.Disagg, "a")})
				later(0, message{rec: rec(phase.Ctx, "a")})
				later(k.genAfter, message{rec: gen})
				for range 2 { // a copy changes nothing
					later(k.genAfter+k.stepAfter, message{header: h, steps: s})
				}
				time.Sleep(6 * time.Second)
				synctest.Wait()
				stop()
				lines := readDir(dir)
				if got := shape(lines); !slices.Equal(got, k.want) {
					t.Fatalf("lines %q, want %q", got, k.want)
				}
				if v := lines[len(lines)-1].Phases[2].Steps.Column("kv_tokens"); !slices.Equal(v, []int64{7}) {
					t.Errorf("kv_tokens %v", v)
				}
			})
		})
	}
}

func TestLinesAreFoundByEitherIDAlsoAfterARestart(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		c, stop := start(t, Options{Dir: dir, Recent: 2})
		for _, id := range []string{"a", "b", "c"} {
			for _, role := range []phase.Role{phase.Ctx, phase.Gen, phase.Disagg} {
				c.in <- message{rec: rec(role, id)}
			}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		findAll(t, c)
		if got := c.Recent(5); len(got) != 2 || !json.Valid(got[0]) {
			t.Errorf("recent holds %d lines, want 2", len(got))
		}
		stop()
	})
	c, err := New(Options{Router: "r0", Dir: dir, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	findAll(t, c)
	if _, ok := c.Find("nobody"); ok {
		t.Error("an unknown id was found")
	}
}

// Who asks for the timeline of a request that has just ended waits for it; who asks for what nobody knows, or for one that still
// runs, does not.
func TestALineThatIsBeingMadeIsAwaited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, stop := start(t, Options{Dir: t.TempDir()})
		defer stop()
		began := time.Now()
		if _, ok := c.Await(t.Context(), "a"); ok || time.Since(began) > time.Second {
			t.Errorf("nobody knows it: found %t, after %v", ok, time.Since(began))
		}
		c.in <- message{rec: rec(phase.Disagg, "a")}
		c.in <- message{rec: rec(phase.Ctx, "a")}
		short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, ok := c.Await(short, "a"); ok {
			t.Error("a line is found that is not made")
		}
		time.AfterFunc(200*time.Millisecond, func() { c.in <- message{rec: rec(phase.Gen, "a")} })
		for _, id := range []string{"client-a", "a"} {
			raw, ok := c.Await(t.Context(), id)
			if l, err := timeline.Parse(raw); !ok || err != nil || !l.Complete {
				t.Errorf("%s: found %t, %v", id, ok, err)
			}
		}
	})
}

func findAll(t *testing.T, c *Collector) {
	t.Helper()
	for _, id := range []string{"a", "client-a", "b", "client-c"} {
		raw, ok := c.Find(id)
		if !ok {
			t.Errorf("%s is not found", id)
			continue
		}
		if l, err := timeline.Parse(raw); err != nil || (l.RequestID != id && l.ClientRequestID != id) {
			t.Errorf("%s: found %s, %v", id, raw, err)
		}
	}
}

func TestRecordsComeThroughTheStreamAndSurviveTheDeathOfTheRouter(t *testing.T) {
	e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: "127.0.0.1:0", StoreDir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conn, err := bus.Connect(ctx, bus.Options{URL: e.URL(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	pub, err := bus.NewPublisher(conn, bus.PublisherOptions{SpoolDir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for _, r := range []*phase.Record{rec(phase.Disagg, "before"), rec(phase.Ctx, "before"), rec(phase.Gen, "before")} {
		if err := pub.Publish(r); err != nil {
			t.Fatal(err)
		}
	}
	lines := make(chan *timeline.Line, 10)
	c, err := New(Options{Router: "r0", Dir: dir, Conn: conn, Publisher: pub, Logger: quiet, Grace: time.Minute, OnLine: func(l *timeline.Line) { lines <- l }})
	if err != nil {
		t.Fatal(err)
	}
	run, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(run) }()
	c.Begin("live")
	pub.Publish(rec(phase.Ctx, "live"))
	pub.Publish(rec(phase.Gen, "live"))
	if err := c.Add(rec(phase.Disagg, "live")); err != nil {
		t.Error(err)
	}
	got := map[string]bool{}
	for len(got) < 2 {
		select {
		case l := <-lines:
			got[l.RequestID] = l.Complete
		case <-ctx.Done():
			t.Fatalf("lines so far: %v", got)
		}
	}
	if !got["before"] || !got["live"] {
		t.Errorf("complete: %v", got)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if n := len(readDir(dir)); n != 2 {
		t.Errorf("%d lines on disk, want 2", n)
	}
	if err := pub.Close(ctx); err != nil {
		t.Error(err)
	}
}

func TestAFolderThatCannotBeMadeIsNamed(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	os.WriteFile(file, nil, 0o600)
	if _, err := New(Options{Router: "r0", Dir: filepath.Join(file, "traces"), Logger: quiet}); err == nil {
		t.Error("no error")
	}
	if _, err := New(Options{Dir: "x"}); err == nil || errors.Is(err, os.ErrNotExist) {
		t.Errorf("no router name: %v", err)
	}
}

// BenchmarkRequests merges requests of three records each from JSON to lines on disk.
func BenchmarkRequests(b *testing.B) {
	c, err := New(Options{Router: "r0", Dir: b.TempDir(), Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	var wire [3][]byte
	for i, role := range []phase.Role{phase.Ctx, phase.Gen, phase.Disagg} {
		wire[i] = phase.Append(nil, rec(role, "aaaaaaaa"))
	}
	n := 0
	for b.Loop() {
		id := fmt.Sprintf("%08d", n)
		n++
		for _, w := range wire {
			r, err := phase.Parse(w)
			if err != nil {
				b.Fatal(err)
			}
			r.RequestID = id
			c.take(message{rec: r})
		}
		if n%512 == 0 {
			c.expire(time.Now())
			c.flush()
		}
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "requests/s")
}

func TestExpectedLineComesOnce(t *testing.T) {
	c := new(Collector)
	first, _ := c.Expect("a")
	_, forget := c.Expect("b")
	forget()
	for _, id := range []string{"a", "a", "b", "c"} {
		c.expected(&timeline.Line{RequestID: id})
	}
	if l := <-first; l.RequestID != "a" || len(c.expects) != 0 || len(first) != 0 {
		t.Errorf("got %s; %d still wait", l.RequestID, len(c.expects))
	}
}

// Records gather for a moment, but not those of a line that somebody waits for.
func TestWhoWaitsForALineGetsItAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, stop := start(t, Options{Dir: t.TempDir()})
		add := func(id string) {
			r := rec(phase.Disagg, id)
			r.Legs = []phase.Leg{} // no other record is to come
			if err := c.Add(r); err != nil {
				t.Error(err)
			}
			synctest.Wait()
		}
		add("a")
		add("b")
		if _, there := c.Find("b"); there {
			t.Error("b was taken alone")
		}
		line, _ := c.Expect("c")
		add("c")
		select {
		case l := <-line:
			if _, there := c.Find("b"); !there || l.RequestID != "c" {
				t.Errorf("got %s; b is there: %v", l.RequestID, there)
			}
		default:
			t.Error("the line of c is not there at once")
		}
		add("d")
		time.Sleep(gatherTime)
		synctest.Wait()
		if _, there := c.Find("d"); !there {
			t.Error("d was not taken after the time to gather")
		}
		add("e") // is taken alone, or begins a batch
		for i := range 2 * gatherMost {
			add(fmt.Sprint("of many ", i))
		}
		if _, there := c.Find(fmt.Sprint("of many ", gatherMost-1)); !there {
			t.Error("a batch of many waits")
		}
		stop()
	})
}

// What others send is not told by the logger that tells of the disk: one that leaves lines out would let the last word be a wrong one.
func TestWhatStrangersSendIsToldApart(t *testing.T) {
	ctx, conn := stream(t)
	var own, strangers bytes.Buffer
	c, err := New(Options{
		Router: "r0", Dir: t.TempDir(), Conn: conn,
		Logger: slog.New(slog.NewTextHandler(&own, nil)), Strangers: slog.New(slog.NewTextHandler(&strangers, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	run, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- c.Run(run) }()
	if _, err := conn.JetStream().Publish(ctx, bus.PhaseSubject("r0", phase.Gen, "g"), []byte("{")); err != nil {
		t.Fatal(err)
	}
	var m dto.Metric
	for m.GetCounter().GetValue() == 0 && ctx.Err() == nil {
		time.Sleep(time.Millisecond)
		if err := c.metrics.bad.Write(&m); err != nil {
			t.Fatal(err)
		}
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
	c.complain(errors.New("the disk is full"))
	if n := strings.Count(strangers.String(), "\n"); n != 1 || !strings.Contains(strangers.String(), "record cannot be read") {
		t.Errorf("of strangers it says %q", &strangers)
	}
	if n := strings.Count(own.String(), "\n"); n != 1 || !strings.Contains(own.String(), "timelines cannot be written") {
		t.Errorf("of itself it says %q", &own)
	}
}
