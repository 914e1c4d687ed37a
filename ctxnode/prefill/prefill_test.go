package prefill

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/device"
	"meridian.internal/gpu/kvwire"
	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
	"meridian.internal/shared/worker"
)

func now() int64 { return time.Now().UnixNano() }

// patient is for a peer that is there and waits for a processor.
var patient = kvwire.Timing{Lost: time.Minute, Idle: time.Minute, Handshake: time.Minute}

// rig is a prefiller on a simulated device, and a client that takes KV and throws it away.
type rig struct {
	*Prefiller
	dev    *device.Device
	client *kvwire.Client
	stop   func()
}

func newRig(t *testing.T, step, lease time.Duration) *rig {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Skip("no loopback network: " + err.Error())
	}
	log := slog.New(slog.DiscardHandler)
	dev, err := device.Open(t.Context(), device.Options{
		Device: "sim", MaxNumTokens: 32, MaxBatchSize: 8, MaxWaiting: 64, TokensPerBlock: 16, KVBlocks: 128, Ranks: 1, PP: 1,
		Overlap: true, PrefixReuse: true, Sim: device.Sim{Step: step},
	}, now, log)
	if err != nil {
		t.Fatal(err)
	}
	hello := kvwire.HelloOf("ctx0", "", dev.Info, 1)
	r := &rig{dev: dev, Prefiller: &Prefiller{Engine: dev.Engine, Endpoint: ln.Addr().String()}}
	r.Server = kvwire.NewServer(kvwire.ServerOptions{Hello: hello, Epoch: 1, Blocks: dev.Info.KVBlocks, Lease: lease, Timing: patient, Now: now, Logger: log})
	hello.Node = "gen0"
	r.client = kvwire.NewClient(kvwire.ClientOptions{Hello: hello, Epoch: 2, Timing: patient, Now: now, Logger: log})
	ctx, cancel := context.WithCancel(context.Background())
	var run sync.WaitGroup
	run.Go(func() { _ = r.Server.Serve(ctx, ln) })
	run.Go(func() { _ = dev.Engine.Run(ctx) })
	r.stop = func() {
		dev.Engine.Drain()
		select {
		case <-dev.Engine.Drained():
		case <-time.After(time.Minute):
			t.Errorf("the engine is not idle: %+v", dev.Engine.Load())
		}
		if n := dev.Engine.LeakedBlocks(); n != 0 {
			t.Errorf("%d blocks leaked", n)
		}
		r.client.Close()
		cancel()
		run.Wait()
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	}
	return r
}

func legOf(id int64, style string, prompt, maxTokens int) *worker.Leg {
	ids := make([]int32, prompt)
	for i := range ids {
		ids[i] = int32(20 + (int(id)*7+i)%500)
	}
	return &worker.Leg{
		Request: infer.Request{ID: id, Kind: infer.ContextOnly, Prompt: ids, MaxTokens: maxTokens, IgnoreEOS: true},
		Style:   style, Disagg: &api.DisaggParams{RequestType: api.ContextOnly, DisaggRequestID: &id},
	}
}

// nowhere is a sink that installs nothing.
type nowhere struct {
	came func() // called with each span; may be nil
}

func (n nowhere) Write(context.Context, infer.Span, []byte) error {
	if n.came != nil {
		n.came()
	}
	return nil
}

func (nowhere) Pull(context.Context, infer.Span, backend.Attached, []int32) (int64, error) {
	return 0, nil
}

func (r *rig) fetch(ctx context.Context, l *worker.Leg) (kvwire.Trailer, error) {
	return r.fetchInto(ctx, l, nowhere{})
}

func (r *rig) fetchInto(ctx context.Context, l *worker.Leg, to nowhere) (kvwire.Trailer, error) {
	tr, err := r.client.Open(ctx, r.Endpoint, l.Request.ID)
	if err != nil {
		return kvwire.Trailer{}, err
	}
	defer tr.Close()
	if err := tr.Request(ctx, 0, time.Minute); err != nil {
		return kvwire.Trailer{}, err
	}
	return tr.Receive(ctx, len(l.Request.Prompt), to)
}

// finish reads a leg to its end; like a face it cancels what it gives up.
func finish(ctx context.Context, s worker.Sequence) (int, *infer.Done, error) {
	n := 0
	for {
		tokens, done, err := s.Next(ctx)
		n += len(tokens)
		if err != nil {
			s.Cancel()
			if _, done, _ = s.Next(context.Background()); done == nil {
				err = errors.Join(err, errors.New("no end after Cancel"))
			}
			return n, done, err
		}
		if done != nil {
			return n, done, nil
		}
	}
}

const (
	// long is the length of a prompt whose prefill takes 28 chunks.
	long = 896
	// slow is the time of a chunk where something has to happen before the last: within seconds, also on a loaded machine. A
	// prefill that is ended in its middle does not take so long.
	slow = 100 * time.Millisecond
)

func TestKVTravelsWhilePrefillRuns(t *testing.T) {
	r := newRig(t, slow, time.Minute)
	defer r.stop()
	l := legOf(1, "generation_first", long, 10)
	var wg sync.WaitGroup
	wg.Go(func() {
		tr, err := r.fetch(t.Context(), l)
		if err != nil || len(tr.First) != 1 || tr.FinishedHere {
			t.Errorf("the receiver got %+v, %v", tr, err)
		}
	})
	seq, err := r.Context(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	_, done, err := finish(t.Context(), seq)
	if err != nil || done.Reason != infer.FinishLength {
		t.Fatalf("%+v, %v", done, err)
	}
	wg.Wait()
	if fault := l.Settle(); fault != nil {
		t.Fatal(fault)
	}
	chunks := done.Report.Chunks
	if len(chunks) < 28 || l.Transfer.StartNS == nil || *l.Transfer.StartNS >= chunks[len(chunks)-1].ForwardStartNS {
		t.Errorf("%d chunks, the last began at %d, the first bytes left at %v", len(chunks), chunks[len(chunks)-1].ForwardStartNS, l.Transfer.StartNS)
	}
	if l.Transfer.Tokens != long || l.Transfer.Bytes != int64(long*r.dev.Info.KVBytes(0, r.dev.Info.Layers)) || l.Transfer.InstalledNS == nil {
		t.Errorf("transfer %+v", l.Transfer)
	}
	if l.Answer == nil || len(l.Answer.FirstGenTokens) != 1 || *l.Answer.CtxInfoEndpoint != "tcp://"+r.Endpoint || *l.Answer.ScheduleStyle != api.GenerationFirst {
		t.Errorf("answer %+v", l.Answer)
	}
}

func TestALegEndsWithAReason(t *testing.T) {
	for _, c := range []struct {
		name    string
		style   string
		max     int
		chunk   time.Duration
		receive func(r *rig, l *worker.Leg) // what the other side does, from the start
		settled string                      // of the hand-over; "": well; "-": there is none
		failed  string                      // of the leg
	}{
		{"the receiver takes it", "context_first", 9, time.Millisecond, func(r *rig, l *worker.Leg) { _, _ = r.fetch(context.Background(), l) }, "", ""},
		{"no receiver comes", "context_first", 9, time.Millisecond, func(*rig, *worker.Leg) {}, "no receiver", ""},
		{"one token was all that was asked for", "context_first", 1, time.Millisecond, func(*rig, *worker.Leg) {}, "-", ""},
		{"one token was all, and the receiver waits", "generation_first", 1, time.Millisecond, func(r *rig, l *worker.Leg) { _, _ = r.fetch(context.Background(), l) }, "", ""},
		{"the receiver goes away during prefill", "generation_first", 9, slow, func(r *rig, l *worker.Leg) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			_, _ = r.fetchInto(ctx, l, nowhere{came: cancel})
		}, "receiver went away", "generation node went away"},
		{"the lease is released", "context_first", 9, slow, func(r *rig, l *worker.Leg) {
			for !r.Server.Withdraw(l.Request.ID) {
				time.Sleep(time.Millisecond)
			}
		}, "withdrawn", "generation node went away"},
	} {
		lease := time.Minute
		if c.settled == "no receiver" {
			lease = 100 * time.Millisecond
		}
		r := newRig(t, c.chunk, lease)
		l := legOf(1, c.style, long, c.max)
		var other sync.WaitGroup
		other.Go(func() { c.receive(r, l) })
		seq, err := r.Context(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		_, done, err := finish(t.Context(), seq)
		if (c.failed == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.failed) || done == nil {
			t.Errorf("%s: the leg ended with %+v, %v; want %q", c.name, done, err, c.failed)
		}
		other.Wait()
		var fault *phase.Error
		if l.Settle != nil {
			fault = l.Settle()
		}
		switch {
		case c.settled == "-" && l.Settle != nil, c.settled == "" && fault != nil, len(c.settled) > 1 && (fault == nil || !strings.Contains(fault.Message, c.settled)):
			t.Errorf("%s: the hand-over ended with %+v, want %q", c.name, fault, c.settled)
		}
		r.stop()
	}
}

func TestACancelledLegFreesItsBlocks(t *testing.T) {
	for _, style := range []string{"generation_first", "context_first"} {
		r := newRig(t, slow, time.Minute)
		l := legOf(1, style, long, 9)
		seq, err := r.Context(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
		if _, done, err := finish(ctx, seq); !errors.Is(err, context.DeadlineExceeded) || done == nil || done.Reason != infer.FinishCancelled {
			t.Errorf("%s: %+v, %v", style, done, err)
		}
		cancel()
		settled := make(chan *phase.Error, 1)
		go func() { settled <- l.Settle() }()
		select {
		case fault := <-settled:
			if fault == nil {
				t.Errorf("%s: the hand-over counts as done", style)
			}
		case <-time.After(30 * time.Second): // the lease would end it after a minute
			t.Fatalf("%s: the KV is still on offer", style)
		}
		r.stop()
	}
}

func TestAnIDThatIsInUseIsRefused(t *testing.T) {
	r := newRig(t, time.Millisecond, time.Minute)
	defer r.stop()
	a, b := legOf(1, "context_first", 20, 9), legOf(1, "context_first", 20, 9)
	seq, err := r.Context(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.Context(t.Context(), b)
	var bad *api.Error
	if !errors.As(err, &bad) || bad.Status() != 409 {
		t.Errorf("got %v", err)
	}
	if _, _, err := finish(t.Context(), seq); err != nil {
		t.Error(err)
	}
	r.Server.Withdraw(1)
	a.Settle()
}

func TestLeasesThatWaitLeaveRoomForPrefillsThatHaveAReceiver(t *testing.T) {
	r := newRig(t, time.Millisecond, time.Minute)
	defer r.stop()
	var held []*worker.Leg
	for id := range int64(4) { // 4 x 16 blocks: half of the 128
		l := legOf(id+1, "context_first", 256, 9)
		seq, err := r.Context(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := finish(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
		held = append(held, l)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := r.Context(ctx, legOf(10, "context_first", 256, 9)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a fifth lease got %v", err)
	}
	l := legOf(11, "generation_first", 900, 9)
	var wg sync.WaitGroup
	wg.Go(func() { _, _ = r.fetch(t.Context(), l) })
	seq, err := r.Context(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := finish(t.Context(), seq); err != nil {
		t.Error(err)
	}
	wg.Wait()
	for _, h := range held {
		r.Server.Withdraw(h.Request.ID)
	}
}
