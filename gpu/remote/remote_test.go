package remote

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"meridian.internal/gpu/collective"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/rows"
)

// rig is an engine and the server of its rank in one process, so that the race detector sees both. Its rank is the only one.
type rig struct {
	*Engine
	t      *testing.T
	device *sim.Device
	events chan kvevent.Event
	served chan error
	ran    chan error
	cancel context.CancelFunc
}

// alone is the meeting point of one rank.
func alone() collective.Member[engine.Word] {
	return collective.New[engine.Word](1, time.Minute).Member(0)
}

type nothing struct{}

func (nothing) Left() ([]rows.Row, bool, int64) { return []rows.Row{{Iter: 7}}, true, 9 }
func (nothing) Last(iter int64) []rows.Row      { return []rows.Row{{Iter: iter}} }

func testNow() int64 { return time.Now().UnixNano() }

// cardAt is what is known of the clock of a card at a burst.
func cardAt(seq int64) clock.Estimate {
	return clock.Estimate{
		Reference: "r", Local: "a", OffsetNS: 1, SkewPPB: 2, SkewErrPPB: 3, EtaPPBPerS: 4, LowerNS: 5, UpperNS: 6, AtNS: 7, ValidFromNS: 8, VoidAfterNS: 9,
		Seq: seq, State: clock.Synced, Transport: "mailbox", Via: "v", RTTNS: 10, Samples: 11,
	}
}

// pipes are the two ends of a rank's links.
func pipes(t testing.TB) (here, there Links) {
	t.Helper()
	var a, b []net.Conn
	for range linkSize {
		c, f, err := socketPair()
		if err != nil {
			t.Fatal(err)
		}
		d, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		a, b = append(a, c), append(b, d)
	}
	return linksOf(a), linksOf(b)
}

func newRig(t *testing.T, deadline time.Duration, cfg engine.Config, dev sim.Config) *rig {
	t.Helper()
	here, there := pipes(t)
	dev.Now, cfg.Now, cfg.Rank = testNow, testNow, 3
	d, err := sim.New(dev)
	if err != nil {
		t.Fatal(err)
	}
	asked := int64(0)
	s := NewServer(there, ServerOptions{Deadline: deadline, Now: testNow, Cards: func() []clock.Estimate {
		asked++ // on the goroutine that sends
		return []clock.Estimate{cardAt(asked), {Local: "b"}}
	}})
	cfg.KVEvents, cfg.OnLoad = s.KVEvent, s.LoadChanged
	cfg.Peers = &engine.Peers{
		Member: alone(), Tell: func(*engine.Word, *engine.Iteration) {}, Hear: func([]engine.Word, *engine.Iteration) {},
		Unsaid: func(*engine.Iteration) bool { return false },
	}
	e, err := engine.New(cfg, d)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, device: d, events: make(chan kvevent.Event, 1000), served: make(chan error, 1), ran: make(chan error, 1)}
	p := &Process{Links: here, rank: 3, pid: 77, kill: func() error { return nil }, ended: make(chan struct{})}
	go func() {
		r.served <- s.Serve(context.Background(), e, nothing{}, Hello{Info: d.Info(), ClockAddr: "here"})
		close(p.ended)
	}()
	if r.Engine, err = Open(t.Context(), p, Options{Rank: 3, Deadline: deadline, Now: testNow, Logger: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	_ = r.Engine.Check() // once it has answered, what the rank said at its start is here
	r.Tell(func(ev kvevent.Event) { r.events <- ev })
	ctx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	go func() { r.ran <- r.Run(ctx) }()
	return r
}

// stop ends the rank in peace, with its books in order.
func (r *rig) stop() {
	r.t.Helper()
	r.cancel()
	if err := <-r.ran; err != nil {
		r.t.Errorf("Run: %v", err)
	}
	if list, carried, iter := r.Left(); len(list) != 1 || list[0].Iter != 7 || !carried || iter != 9 {
		r.t.Errorf("left are %v, %t, %d", list, carried, iter)
	}
	if list := r.Last(11); len(list) != 1 || list[0].Iter != 11 {
		r.t.Errorf("last are %v", list)
	}
	if n, err := r.LeakedBlocks(), r.Check(); n != 0 || err != nil {
		r.t.Errorf("%d blocks leaked, %v", n, err)
	}
	if err := errors.Join(r.Close(), <-r.served, r.device.Close()); err != nil {
		r.t.Error(err)
	}
}

func finish(s *Sequence) (ids []int32, done *infer.Done, err error) {
	for {
		tokens, d, err := s.Next(context.Background())
		if err != nil {
			return ids, done, err
		}
		for _, t := range tokens {
			ids = append(ids, t.ID)
		}
		if d != nil {
			return ids, d, nil
		}
	}
}

var device = sim.Config{Vocab: 100, TokensPerBlock: 8, KVBlocks: 40, MaxSlots: 4}

func prompt(n int) []int32 {
	out := make([]int32, n)
	for i := range out {
		out[i] = int32(i*7) % 100
	}
	return out
}

// TestARequestIsThatOfAnEngine goes through all that a node asks of a rank.
func TestARequestIsThatOfAnEngine(t *testing.T) {
	r := newRig(t, time.Minute, engine.Config{PrefixReuse: true, MaxWaiting: 4}, device)
	if h := r.Hello(); h.Info.KVBlocks != 40 || h.ClockAddr != "here" {
		t.Errorf("hello is %+v", h)
	}
	before := testNow()
	s, err := r.Submit(infer.Request{ID: 5, Prompt: prompt(30), MaxTokens: 9, IgnoreEOS: true, ReturnPerfMetrics: true, DeadlineNS: before + int64(time.Minute)})
	if err != nil {
		t.Fatal(err)
	}
	ids, done, err := finish(s)
	if err != nil || len(ids) != 9 || done.Reason != infer.FinishLength || *done.Report.Rank != 3 || done.Report.QueuedNS < before || done.Report.PromptTokens != 30 {
		t.Errorf("%v, %+v, %v", ids, done, err)
	}
	if steps := done.Report.Steps; steps == nil || steps.N != 8 {
		t.Errorf("steps are %+v, want 8", steps)
	} else if d, err := steps.Decode(); err != nil || len(d.Iter) != 8 {
		t.Errorf("steps decode to %+v, %v", d, err)
	}
	if s.ID() != 5 || s.Rank() != 3 || s.Export() != nil {
		t.Errorf("id %d, rank %d, export %v", s.ID(), s.Rank(), s.Export())
	}
	if _, _, err := s.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v", err)
	}
	if ev := <-r.events; ev.Type != kvevent.Stored || len(ev.Blocks) != 1 {
		t.Errorf("the first KV event is %+v", ev)
	}
	if l := r.Load(); l.KVMaxBlocks != 40 || l.Iter == 0 {
		t.Errorf("load is %+v", l)
	}
	if n := r.Queued(); n != 0 {
		t.Errorf("%d are queued", n)
	}
	if got, want := r.CardClocks(), []clock.Estimate{cardAt(2), {Local: "b"}}; !slices.Equal(got, want) { // asked for the hello and for the end
		t.Errorf("the clocks of its cards are %+v, want %+v", got, want)
	}
	for name, c := range map[string]struct {
		r    infer.Request
		want error
	}{
		"no prompt":      {infer.Request{MaxTokens: 1}, engine.ErrInvalid},
		"too long":       {infer.Request{Prompt: prompt(10), MaxTokens: 1 << 20}, engine.ErrTooLong},
		"of no use here": {infer.Request{Kind: infer.GenerationOnly, Prompt: prompt(1), MaxTokens: 2}, engine.ErrInvalid},
	} {
		if _, err := r.Submit(c.r); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
	}
	if _, err := r.StopProfile(t.Context()); !errors.Is(err, rows.ErrProfileInvalid) && !errors.Is(err, rows.ErrProfileNone) {
		t.Errorf("StopProfile: %v", err)
	}
	r.Drain()
	<-r.Drained()
	if _, err := r.Submit(infer.Request{Prompt: prompt(3), MaxTokens: 1}); !errors.Is(err, engine.ErrDraining) {
		t.Errorf("after Drain: %v", err)
	}
	r.stop()
}

func TestACancelEndsWhatRunsAndWhatWaits(t *testing.T) {
	dev, held := device, make(chan struct{})
	dev.Cost = sim.Cost{Step: 1e6}
	steps := 0
	dev.Sleep = func(time.Duration) {
		if steps++; steps > 2 {
			<-held
		}
	}
	r := newRig(t, time.Minute, engine.Config{MaxBatchSize: 1}, dev)
	a, err := r.Submit(infer.Request{ID: 1, Prompt: prompt(10), MaxTokens: 200, IgnoreEOS: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := a.Next(t.Context()); err != nil { // it runs until the device goes on
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := r.Reserve(ctx, infer.Request{ID: 2, Kind: infer.GenerationOnly, Prompt: prompt(10), MaxTokens: 5}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a reservation without a place: %v", err)
	}
	late, err := r.Submit(infer.Request{ID: 3, Prompt: prompt(10), MaxTokens: 5, DeadlineNS: testNow() + int64(20*time.Millisecond)})
	if err != nil {
		t.Fatal(err)
	}
	if _, done, err := finish(late); err != nil || !errors.Is(done.Err, engine.ErrDeadline) || done.Reason != infer.FinishExpired {
		t.Errorf("a request past its deadline: %+v, %v", done, err)
	}
	a.Cancel()
	_ = r.LeakedBlocks() // an order that is answered: the one before it, to cancel, has been obeyed
	close(held)
	if _, done, err := finish(a); err != nil || done.Reason != infer.FinishCancelled || !errors.Is(done.Err, engine.ErrCancelled) {
		t.Errorf("cancelled: %+v, %v", done, err)
	}
	r.stop()
}

// TestKVGoesInAndOut computes a prompt, takes its KV out, and decodes from it on the same rank, twice.
func TestKVGoesInAndOut(t *testing.T) {
	r := newRig(t, time.Minute, engine.Config{MaxNumTokens: 16}, device)
	req := infer.Request{ID: 1, Prompt: prompt(40), MaxTokens: 6, IgnoreEOS: true}
	one, err := r.Submit(req)
	if err != nil {
		t.Fatal(err)
	}
	want, _, err := finish(one)
	if err != nil {
		t.Fatal(err)
	}
	req.Kind = infer.ContextOnly
	s, err := r.Submit(req)
	if err != nil {
		t.Fatal(err)
	}
	x := s.Export()
	info := r.Hello().Info
	spans := map[infer.Span][]byte{}
	for {
		span, err := x.NextSpan(t.Context())
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		spans[span] = make([]byte, engine.SpanBytes(info, span))
		if err := x.Read(t.Context(), span, spans[span]); err != nil {
			t.Fatal(err)
		}
	}
	if len(spans) < 3 || x.Tokens() != 40 {
		t.Errorf("%d spans of %d tokens", len(spans), x.Tokens())
	}
	first, _, err := finish(s)
	if err != nil {
		t.Fatal(err)
	}
	wrong := infer.Span{LayerTo: 99, TokenTo: 1}
	if err := x.Read(t.Context(), wrong, make([]byte, 8)); !errors.Is(err, engine.ErrInvalid) {
		t.Errorf("a span that is none: %v", err)
	}
	if _, err := x.Blocks(wrong); !errors.Is(err, engine.ErrInvalid) {
		t.Errorf("Blocks: %v", err)
	}
	x.Release()
	if _, err := x.NextSpan(t.Context()); !errors.Is(err, engine.ErrCancelled) {
		t.Errorf("NextSpan after Release: %v", err)
	}
	req.Kind = infer.GenerationOnly
	for range 2 {
		h, err := r.Reserve(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if h.Tokens() != 40 || h.Held() != 0 || h.Report().QueuedNS == 0 || *h.Report().Rank != 3 {
			t.Errorf("a reservation of %d tokens, %d held, %+v", h.Tokens(), h.Held(), h.Report())
		}
		if _, err := h.Start([]infer.Token{{ID: first[0]}}); !errors.Is(err, engine.ErrInvalid) {
			t.Errorf("a start without KV: %v", err)
		}
		if err := h.Write(t.Context(), wrong, make([]byte, 8)); !errors.Is(err, engine.ErrInvalid) {
			t.Errorf("a span that is none: %v", err)
		}
		for span, b := range spans {
			if err := h.Write(t.Context(), span, b); err != nil {
				t.Fatal(err)
			}
		}
		q, err := h.Start([]infer.Token{{ID: first[0]}})
		if err != nil {
			t.Fatal(err)
		}
		h.Cancel() // too late: it does nothing
		if got, _, err := finish(q); err != nil || !slices.Equal(got, want) {
			t.Errorf("after the hand-over %v, want %v, %v", got, want, err)
		}
	}
	h, err := r.Reserve(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	h.Cancel()
	for !errors.Is(err, engine.ErrCancelled) { // orders and KV have connections of their own
		if err = h.Write(t.Context(), infer.Span{LayerTo: 1, TokenTo: 1}, make([]byte, 8)); err == nil {
			t.Fatal("KV was written to nowhere")
		}
	}
	r.stop()
}

// TestWhatARankHasKeptOnDiskIsTold: it says so at its start, before anybody listens.
func TestWhatARankHasKeptOnDiskIsTold(t *testing.T) {
	cfg := engine.Config{PrefixReuse: true, DiskKVDir: t.TempDir(), DiskKVBytes: 1 << 20}
	r := newRig(t, time.Minute, cfg, device)
	s, err := r.Submit(infer.Request{ID: 1, Prompt: prompt(30), MaxTokens: 2, IgnoreEOS: true})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := finish(s); err != nil {
		t.Fatal(err)
	}
	const blocks, size = 3, 4 * 2 * 2 * 2 * 4 * 8                            // bytes: layers, K and V, heads, head size, float32, tokens
	for end := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) { // files are written in real time
		f, err := os.Stat(filepath.Join(cfg.DiskKVDir, "kv.blocks"))
		if err != nil || time.Now().After(end) {
			t.Fatalf("%+v, %v: want %d blocks of %d bytes", f, err, blocks, size)
		}
		if f.Size() >= blocks*size {
			break
		}
	}
	r.stop()
	r = newRig(t, time.Minute, cfg, device)
	if n := len(r.events); n != blocks {
		t.Errorf("%d blocks are told, want %d", n, blocks)
	}
	for range len(r.events) {
		if ev := <-r.events; ev.Type != kvevent.Stored || len(ev.Blocks) != 1 || ev.Blocks[0].Tier != kvevent.Disk {
			t.Errorf("told %+v, want a block on disk", ev)
		}
	}
	r.stop()
}

// TestAProcessThatIsSilentIsLost: nobody asks it anything, and yet it is missed.
func TestAProcessThatIsSilentIsLost(t *testing.T) {
	here, there := pipes(t)
	p := &Process{Links: here, rank: 2, pid: 77, kill: func() error { return nil }, ended: make(chan struct{})}
	close(p.ended)
	l := newLink[packet, order](there.orders, time.Minute)
	if err := l.send(&packet{Hello: &Hello{}}, nil); err != nil {
		t.Fatal(err)
	}
	e, err := Open(t.Context(), p, Options{Rank: 2, Deadline: 100 * time.Millisecond, Now: testNow})
	if err != nil {
		t.Fatal(err)
	}
	var calls sync.WaitGroup
	calls.Go(func() {
		if _, err := e.Reserve(context.Background(), infer.Request{Kind: infer.GenerationOnly}); !errors.Is(err, ErrGone) || !errors.Is(err, engine.ErrStopped) {
			t.Errorf("a reservation ended with %v", err)
		}
	})
	if err := e.Run(t.Context()); !errors.Is(err, ErrGone) || !strings.Contains(err.Error(), "rank 2: nothing was heard of its process 77 for 100ms") {
		t.Errorf("Run: %v", err)
	}
	calls.Wait()
	if err := e.Close(); err != nil || !e.Lost() {
		t.Errorf("Close: %v, lost %t", err, e.Lost())
	}
	if n, err := e.LeakedBlocks(), e.Check(); n != 0 || err != nil {
		t.Errorf("of a lost process: %d leaked, %v", n, err)
	}
	there.close()
}

// TestTheEndOfTheNodeIsThatOfTheRank whatever it was doing.
func TestTheEndOfTheNodeIsThatOfTheRank(t *testing.T) {
	dev := device
	dev.Cost = sim.Cost{Step: 1e6}
	r := newRig(t, time.Minute, engine.Config{MaxBatchSize: 1}, dev)
	for kind := range 3 {
		_, _ = r.Submit(infer.Request{ID: int64(kind), Kind: infer.Kind(kind % 2), Prompt: prompt(10), MaxTokens: 200, IgnoreEOS: true})
	}
	go func() { // waits for ever: there is no place
		_, _ = r.Reserve(context.Background(), infer.Request{ID: 9, Kind: infer.GenerationOnly, Prompt: prompt(10), MaxTokens: 5})
	}()
	time.Sleep(5 * time.Millisecond)
	r.Process().Links.close()
	if err := <-r.served; err != nil {
		t.Errorf("the rank ended with %v", err)
	}
	if err := <-r.ran; !errors.Is(err, ErrGone) {
		t.Errorf("the node's side ended with %v", err)
	}
	if err := errors.Join(r.Close(), r.device.Close()); err != nil {
		t.Error(err)
	}
	r.cancel()
}

func TestErrorsStayWhatTheyAre(t *testing.T) {
	for _, err := range known {
		if got := faultOf(err).error(); got != err { //nolint:errorlint // the value itself is wanted
			t.Errorf("%v became %v", err, got)
		}
	}
	long := errors.Join(engine.ErrStopped, errors.New("rank 2 fell"), engine.ErrDeadline)
	if got := faultOf(long).error(); got.Error() != long.Error() || !errors.Is(got, engine.ErrStopped) || !errors.Is(got, engine.ErrDeadline) || errors.Is(got, engine.ErrInvalid) {
		t.Errorf("%v became %v", long, got)
	}
	if err := faultOf(nil).error(); err != nil {
		t.Errorf("no error became %v", err)
	}
	if err := (&fault{Text: "x", Is: []int{-1, 99}}).error(); err == nil || err.Error() != "x" {
		t.Errorf("an unknown kind became %v", err)
	}
}

// TestNothingOfAnEndIsLost: a zero that is known stays one.
func TestNothingOfAnEndIsLost(t *testing.T) {
	rank, token, energy := 4, int32(0), 0.0
	want := &infer.Done{Reason: infer.FinishStop, StopToken: &token, Report: infer.Report{
		QueuedNS: 1, FirstScheduledNS: 2, FirstTokenNS: 3, LastTokenNS: 4, FinishedNS: 5, PreemptedNS: 6, Preemptions: 7, FirstIter: 8, LastIter: 9, Rank: &rank,
		PromptTokens: 10, CachedTokens: 11, OutputTokens: 12, KV: infer.KVCounts{AllocTotalBlocks: 13, MissedBlocks: 14}, EnergyJ: &energy,
		Chunks: []infer.Chunk{{Iter: 15, SampleEndNS: 16}}, Steps: &infer.StepRecords{N: 1, Pages: []infer.StepPage{{Rows: 17, Runs: []infer.StepRun{{N: 18}}}}},
	}}
	a, b := net.Pipe()
	from, to := newLink[packet, order](a, time.Minute), newLink[order, packet](b, time.Minute)
	go func() {
		_ = from.send(&packet{Items: []item{{Done: doneOf(want)}, {Done: doneOf(&infer.Done{Reason: infer.FinishLength})}}, Payload: 3}, []byte("abc"))
	}()
	got, err := to.receive()
	if err != nil {
		t.Fatal(err)
	}
	if b, err := to.payload(got.Payload, nil); err != nil || string(b) != "abc" {
		t.Errorf("after the message came %q, %v", b, err)
	}
	if d := got.Items[0].Done.done(rank); !reflect.DeepEqual(d, want) {
		t.Errorf("got %+v\nwant %+v", d, want)
	}
	if d := got.Items[1].Done.done(rank); d.StopToken != nil || d.Err != nil || d.Report.EnergyJ != nil || d.Report.Steps != nil {
		t.Errorf("an end without them has %+v", d)
	}
}

// FuzzRank holds a node against what is no rank: it loses the rank, with an error, and everything that waits ends.
func FuzzRank(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		here, there := pipes(t)
		p := &Process{Links: here, rank: 1, pid: 77, kill: func() error { return nil }, ended: make(chan struct{})}
		close(p.ended)
		hello := newLink[packet, order](there.orders, time.Minute)
		if err := hello.send(&packet{Hello: &Hello{}}, nil); err != nil {
			t.Fatal(err)
		}
		e, err := Open(t.Context(), p, Options{Rank: 1, Deadline: time.Minute, Now: testNow})
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []net.Conn{there.orders, there.kv} {
			_, _ = c.Write(b)
			_ = c.Close()
		}
		if err := e.Run(t.Context()); !errors.Is(err, ErrGone) {
			t.Errorf("Run: %v", err)
		}
		there.close()
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}

// FuzzNode holds a rank against what is no node: it ends.
func FuzzNode(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		here, there := pipes(t)
		d, err := sim.New(sim.Config{Now: testNow})
		if err != nil {
			t.Fatal(err)
		}
		s := NewServer(there, ServerOptions{Deadline: time.Minute, Now: testNow})
		e, err := engine.New(engine.Config{Now: testNow, Peers: &engine.Peers{Member: alone(), Hear: func([]engine.Word, *engine.Iteration) {}, Unsaid: func(*engine.Iteration) bool { return false }}}, d)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range []net.Conn{here.orders, here.kv} {
			_, _ = c.Write(b)
			_ = c.Close()
		}
		_ = s.Serve(t.Context(), e, nothing{}, Hello{})
		here.close()
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}
