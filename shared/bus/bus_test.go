package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/phase"
	"meridian.internal/shared/serve/servetest"
)

var quiet = slog.New(slog.DiscardHandler)

func within(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func startServer(t *testing.T, listen, dir string) *Embedded {
	t.Helper()
	e, err := StartEmbedded(EmbeddedOptions{Listen: listen, StoreDir: dir, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	return e
}

func connect(t *testing.T, url string) *Conn {
	t.Helper()
	c, err := Connect(t.Context(), Options{URL: url, Name: "test", Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func aRecord(id string) *phase.Record {
	return &phase.Record{Schema: phase.Schema, Role: phase.Ctx, Node: "ctx 0", Router: "r", Instance: "0000000000000001.00000002", RequestID: id}
}

func TestTokenKeepsNamesApart(t *testing.T) {
	cases := map[string]string{"ctx0": "ctx0", "a.b": "a=2Eb", "a b": "a=20b", "a=b": "a=3Db", "": "none", "*": "=2A", "é": "=C3=A9"}
	for name, want := range cases {
		if got := Token(name); got != want {
			t.Errorf("Token(%q) = %q, want %q", name, got, want)
		}
	}
}

// lines counts lines of a log.
type lines struct{ n atomic.Int64 }

func (l *lines) Write(b []byte) (int, error) {
	l.n.Add(1)
	return len(b), nil
}

// TestAReasonThatStaysIsLoggedOnce: a server without room for the streams is asked again and again.
func TestAReasonThatStaysIsLoggedOnce(t *testing.T) {
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	t.Cleanup(s.Shutdown)
	if !s.ReadyForConnections(time.Minute) {
		t.Fatal("the server does not start")
	}
	nc, err := nats.Connect(s.ClientURL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	reasons := make(chan string, 1)
	reason := "insufficient storage resources available"
	made := make(chan struct{})
	for subject, answer := range map[string]func() string{
		"$JS.API.STREAM.INFO.*": func() string {
			return `{"error":{"code":404,"err_code":10059,"description":"stream not found"}}`
		},
		"$JS.API.STREAM.CREATE.*": func() string {
			select {
			case reason = <-reasons:
			default:
			}
			select {
			case made <- struct{}{}:
			case <-t.Context().Done():
			}
			return `{"error":{"code":500,"err_code":10047,"description":"` + reason + `"}}`
		},
	} {
		if _, err := nc.Subscribe(subject, func(m *nats.Msg) { _ = m.Respond([]byte(answer())) }); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	var log lines
	c, err := Connect(t.Context(), Options{URL: s.ClientURL(), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	ctx := within(t)
	next := func() {
		select {
		case <-made:
		case <-ctx.Done():
			t.Fatal("nobody asks for streams")
		}
	}
	for range 9 { // an attempt asks twice, for two sizes
		next()
	}
	if n := log.n.Load(); n != 1 {
		t.Errorf("%d lines after several attempts, want 1", n)
	}
	reasons <- "maximum number of streams reached"
	for range 9 {
		next()
	}
	if n := log.n.Load(); n < 2 || n > 3 { // an attempt may have met both
		t.Errorf("%d lines after another reason, want one for each", n)
	}
}

// TestAServerThatTakesNoRecordsIsSaidOnce: it may be there and have no room.
func TestAServerThatTakesNoRecordsIsSaidOnce(t *testing.T) {
	for _, c := range []struct {
		name  string
		fails int
		err   error
		lines int64
	}{
		{"no room for long", 20, errors.New("no room"), 2},
		{"no room for a moment", 2, errors.New("no room"), 0},
		{"no connection", 20, nats.ErrDisconnected, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log lines
				p, err := newPublisher(PublisherOptions{SpoolDir: t.TempDir(), Logger: slog.New(slog.NewTextHandler(&log, nil))})
				if err != nil {
					t.Fatal(err)
				}
				left := c.fails
				p.send = func(context.Context, []entry) error {
					if left--; left < 0 {
						return nil
					}
					return c.err
				}
				if p.sendAll(t.Context(), []entry{{id: "a"}}) > 0 {
					t.Error("not sent")
				}
				if n := log.n.Load(); n != c.lines {
					t.Errorf("%d lines, want %d", n, c.lines)
				}
				p.spool.close(p.done)
			})
		})
	}
}

func TestStreamsAndBucketsExistAfterReady(t *testing.T) {
	e := startServer(t, "127.0.0.1:0", t.TempDir())
	c := connect(t, e.URL())
	if err := c.Ready(within(t)); err != nil {
		t.Fatal(err)
	}
	for _, s := range []string{StreamPhases, StreamClockLog} {
		if _, err := c.JetStream().Stream(within(t), s); err != nil {
			t.Errorf("stream %s: %v", s, err)
		}
	}
	for _, b := range []string{BucketNodes, BucketClocks} {
		if _, err := c.KV(within(t), b); err != nil {
			t.Errorf("bucket %s: %v", b, err)
		}
	}
	if err := EnsureStreams(within(t), c.JetStream()); err != nil {
		t.Errorf("a second time: %v", err)
	}
}

func TestRecordsArriveOnceThoughTheServerComesLateAndRestarts(t *testing.T) {
	store, spoolDir := t.TempDir(), t.TempDir()
	addr := servetest.Addr(t)
	c := connect(t, "nats://"+addr)
	p, err := NewPublisher(c, PublisherOptions{SpoolDir: spoolDir, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, p, "early")
	e := startServer(t, addr, store)
	if err := p.Flush(within(t)); err != nil {
		t.Fatal(err)
	}
	e.Close()
	publish(t, p, "while away")
	startServer(t, addr, store)
	if err := p.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	got := received(t, c, 2)
	if strings.Join(got, ",") != "early,while away" {
		t.Errorf("received %q", got)
	}
	if s := p.Stats(); s.Emitted != 2 || s.Stored != 2 || s.Dropped != 0 || s.Pending != 0 {
		t.Errorf("stats %+v", s)
	}
	if err := p.Publish(aRecord("late")); !errors.Is(err, ErrClosed) {
		t.Errorf("publish after Close: %v, want ErrClosed", err)
	}
}

func publish(t *testing.T, p *Publisher, id string) {
	t.Helper()
	if err := p.Publish(aRecord(id)); err != nil {
		t.Fatal(err)
	}
}

func received(t *testing.T, c *Conn, n int) (ids []string) {
	t.Helper()
	cons, err := c.JetStream().CreateOrUpdateConsumer(within(t), StreamPhases, jetstream.ConsumerConfig{FilterSubject: RouterSubjects("r")})
	if err != nil {
		t.Fatal(err)
	}
	batch, err := cons.Fetch(n, jetstream.FetchMaxWait(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	for m := range batch.Messages() {
		rec, err := phase.Parse(m.Data())
		if err != nil {
			t.Fatal(err)
		}
		if want := "meridian.phase.r.ctx.ctx=200"; m.Subject() != want {
			t.Errorf("subject %q, want %q", m.Subject(), want)
		}
		ids = append(ids, rec.RequestID)
	}
	if left := cons.CachedInfo(); left != nil && left.NumPending > uint64(n) {
		t.Errorf("%d messages, want %d", left.NumPending, n)
	}
	return ids
}

func TestServerRecognisesARecordThatIsSentTwice(t *testing.T) {
	e := startServer(t, "127.0.0.1:0", t.TempDir())
	c := connect(t, e.URL())
	if err := c.Ready(within(t)); err != nil {
		t.Fatal(err)
	}
	p := &Publisher{conn: c}
	twice := []entry{{subject: "meridian.phase.r.ctx.n", id: "x.1", data: []byte("{}")}}
	for range 2 {
		if err := p.sendJetStream(within(t), twice); err != nil {
			t.Fatal(err)
		}
	}
	s, _ := c.JetStream().Stream(within(t), StreamPhases)
	info, err := s.Info(within(t))
	if err != nil || info.State.Msgs != 1 {
		t.Errorf("stream holds %d messages, want 1 (%v)", info.State.Msgs, err)
	}
}

// fake stands for the server: it refuses until it is opened.
type fake struct {
	mu   sync.Mutex
	open bool
	got  []string
}

func (f *fake) send(_ context.Context, es []entry) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.open {
		return errors.New("away")
	}
	for _, e := range es {
		f.got = append(f.got, e.id)
	}
	return nil
}

func TestPublisherCountsWhatItDrops(t *testing.T) {
	p, err := newPublisher(PublisherOptions{SpoolDir: t.TempDir(), MaxBytes: 2000, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{}
	p.send = f.send
	p.start()
	lost := int64(0)
	for range 10 {
		if err := p.Publish(aRecord("q")); err != nil {
			lost++
		}
	}
	f.mu.Lock()
	f.open = true
	f.mu.Unlock()
	if err := p.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	s := p.Stats()
	if lost == 0 || s.Dropped != lost || s.Emitted != 10 || s.Stored != 10-lost || int64(len(f.got)) != s.Stored {
		t.Errorf("stats %+v, %d errors, %d arrived", s, lost, len(f.got))
	}
}

func TestWhatNoStreamTakesIsDroppedAndHoldsUpNobody(t *testing.T) {
	e := startServer(t, "127.0.0.1:0", t.TempDir())
	c := connect(t, e.URL())
	p, err := NewPublisher(c, PublisherOptions{SpoolDir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	large := func(n int) *phase.Record {
		rec := aRecord("large")
		rec.FinishReason = strings.Repeat("x", n-len(phase.Append(nil, rec))-len(`"finish_reason":"",`))
		return rec
	}
	if err := p.Publish(large(maxData)); err != nil {
		t.Errorf("the largest: %v", err)
	}
	if err := p.Publish(large(maxData + 1)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("one byte more: %v, want ErrTooLarge", err)
	}
	if _, err := p.PublishHeld(large(maxMessage)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a held one: %v, want ErrTooLarge", err)
	}
	publish(t, p, "next")
	if err := p.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	if got := received(t, c, 2); strings.Join(got, ",") != "large,next" {
		t.Errorf("received %q", got)
	}
	if s := p.Stats(); s.Emitted != 4 || s.Stored != 2 || s.Dropped != 2 {
		t.Errorf("stats %+v", s)
	}
}

func TestAnotherProcessSendsWhatADeadOneLeft(t *testing.T) {
	dir := t.TempDir()
	first, err := newPublisher(PublisherOptions{SpoolDir: dir, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	publish(t, first, "left behind")
	first.spool.w.close()
	first.spool.release()
	second, err := newPublisher(PublisherOptions{SpoolDir: dir, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{open: true}
	second.send = f.send
	second.start()
	if err := second.Register(prometheus.NewRegistry()); err != nil {
		t.Error(err)
	}
	if err := second.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	if s := second.Stats(); s.Recovered != 1 || s.Stored != 1 || len(f.got) != 1 {
		t.Errorf("stats %+v, arrived %v", s, f.got)
	}
}

func TestADiskThatRefusesIsReplacedByMemory(t *testing.T) {
	p, err := newPublisher(PublisherOptions{SpoolDir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{open: true}
	p.send = f.send
	p.spool.w.close() // every write fails from here on
	publish(t, p, "kept in memory")
	for _, id := range []string{"the second", "the third"} {
		if _, err := p.PublishHeld(aRecord(id)); err != nil {
			t.Fatal(err)
		}
	}
	for i, id := range []string{"kept in memory", "the second", "the third"} {
		if e := p.memory[i]; !strings.Contains(string(e.data), id) {
			t.Errorf("message %d is %s", i, e.data)
		}
	}
	p.start()
	if err := p.Close(within(t)); err != nil {
		t.Fatal(err)
	}
	if s := p.Stats(); s.Stored != 3 || s.Dropped != 0 {
		t.Errorf("stats %+v", s)
	}
}

// What memory has left at the end is lost; what of it was stored before is not.
func TestTheEndCountsEachMessageInMemoryOnce(t *testing.T) {
	p, err := newPublisher(PublisherOptions{SpoolDir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	sends := 0
	ending, end := context.WithCancel(t.Context())
	p.send = func(context.Context, []entry) error {
		if sends++; sends == 1 {
			return nil
		}
		end() // the server goes away for good
		return errors.New("away")
	}
	p.spool.w.close() // every write fails from here on
	for range maxOldSend + 3 {
		publish(t, p, "kept in memory")
	}
	p.start()
	if err := p.Close(ending); !errors.Is(err, context.Canceled) {
		t.Errorf("closed with %v", err)
	}
	if s := p.Stats(); s.Stored != maxOldSend || s.Dropped != 3 || s.Pending != 0 {
		t.Errorf("stats %+v, want %d stored and 3 dropped", s, maxOldSend)
	}
}

// TestADiskThatRefusesIsSaidOnceAMinute: where the server is there, each record leaves memory at once.
func TestADiskThatRefusesIsSaidOnceAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log lines
		p, err := newPublisher(PublisherOptions{SpoolDir: t.TempDir(), Logger: slog.New(slog.NewTextHandler(&log, nil))})
		if err != nil {
			t.Fatal(err)
		}
		p.spool.w.close() // every write fails from here on
		for range 5 {
			publish(t, p, "kept in memory")
			p.memory = nil // sent
			time.Sleep(40 * time.Second)
		}
		if n := log.n.Load(); n != 3 {
			t.Errorf("%d lines for five records within 160 s, want 3", n)
		}
		p.spool.close(p.done)
	})
}

func TestURLsOfServersAreChecked(t *testing.T) {
	for _, good := range []string{"nats://h:4222", "tls://h", "nats://a:1, nats://b:2", "wss://h/path"} {
		if err := CheckURLs(good); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"", "h", "h:4222", "http://h:4222", "nats://", "nats://a:1,b:2"} {
		if _, err := Connect(t.Context(), Options{URL: bad}); err == nil || !strings.Contains(err.Error(), "want nats://host:port") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestBadListenAddressIsRefusedByName(t *testing.T) {
	for _, listen := range []string{"", "127.0.0.1", "127.0.0.1:http2", "127.0.0.1:70000"} {
		if _, err := StartEmbedded(EmbeddedOptions{Listen: listen, StoreDir: t.TempDir()}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("address %q: ", listen)) {
			t.Errorf("%q: %v", listen, err)
		}
	}
}

func TestAPortInUseIsRefusedAtOnce(t *testing.T) {
	e := startServer(t, "127.0.0.1:0", t.TempDir())
	if _, err := StartEmbedded(EmbeddedOptions{Listen: e.Addr().String(), StoreDir: t.TempDir(), Logger: quiet}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("error %v, want address in use", err)
	}
}

func BenchmarkPublish(b *testing.B) {
	p, err := newPublisher(PublisherOptions{SpoolDir: b.TempDir(), Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	p.send = (&fake{open: true}).send
	p.start()
	rec := aRecord("bench")
	for b.Loop() {
		p.Publish(rec)
	}
	p.Close(b.Context())
}

// Lines about what clients do wrong begin with what that is: each connection of one has another port and number.
func TestTheServersLinesBeginWithWhatTheySay(t *testing.T) {
	lines := make(chan string, 100)
	e, err := StartEmbedded(EmbeddedOptions{Listen: "127.0.0.1:0", StoreDir: t.TempDir(), Token: "secret", Logger: slog.New(firstFields(lines))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Close)
	for range 3 {
		if c, err := nats.Connect(e.URL(), nats.Token("wrong")); err == nil {
			c.Close()
			t.Fatal("a wrong token is taken")
		}
		if got := <-lines; !strings.HasPrefix(got, "authentication error") {
			t.Errorf("a line begins with %q", got)
		}
	}
}

// firstFields is a handler that passes on the value of the first field of each warning.
type firstFields chan<- string

func (f firstFields) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelWarn }
func (f firstFields) WithAttrs([]slog.Attr) slog.Handler           { return f }
func (f firstFields) WithGroup(string) slog.Handler                { return f }
func (f firstFields) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		f <- a.Value.String()
		return false
	})
	return nil
}

// A record that no subject can carry is refused, and holds up no other; so is one that an earlier version left in the spool.
func TestALongSubjectHoldsUpNobody(t *testing.T) {
	e := startServer(t, "127.0.0.1:0", t.TempDir())
	p, err := NewPublisher(connect(t, e.URL()), PublisherOptions{SpoolDir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	bad := aRecord("bad")
	bad.Router = strings.Repeat("é", 3000)
	if err := p.Publish(bad); !errors.Is(err, ErrTooLarge) {
		t.Errorf("a router's name of 6000 bytes: %v", err)
	}
	p.emitted.Add(1) // by the earlier version
	if p.sendAll(t.Context(), []entry{{subject: strings.Repeat("x", maxSubject+1)}}) > 0 || p.dropped.Load() != 2 {
		t.Errorf("%d dropped, want both", p.dropped.Load())
	}
	if err := p.Publish(aRecord("good")); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := p.Flush(ctx); err != nil || p.stored.Load() != 1 {
		t.Errorf("%v, %d stored", err, p.stored.Load())
	}
	p.Close(ctx)
}
