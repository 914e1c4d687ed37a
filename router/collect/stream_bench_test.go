package collect

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// envNATS makes this binary the NATS server of BenchmarkFromStream, so that its CPU is not that of the merge.
const envNATS = "MERIDIAN_BENCH_NATS"

func TestMain(m *testing.M) {
	dir := os.Getenv(envNATS)
	if dir == "" {
		os.Exit(m.Run())
	}
	e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: "127.0.0.1:0", StoreDir: dir, Logger: quiet})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(e.URL())
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM)
	<-end
	e.Close()
}

func natsProcess(b *testing.B) (url string) {
	b.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), envNATS+"="+b.TempDir())
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { cmd.Process.Signal(syscall.SIGTERM); cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		b.Fatal(err)
	}
	return strings.TrimSpace(line)
}

// wireOf is a record of a request as it travels, with eight letters in place of its id.
func wireOf(role phase.Role) []byte { return phase.Append(nil, typical(role)) }

// typical is what a record of a cluster holds whose nodes keep no steps: every stamp, the clock's estimate, the KV's way.
func typical(role phase.Role) *phase.Record {
	r := rec(role, "aaaaaaaa")
	at := func(us int64) *int64 { v := 1_000_000_000 + us*1000 + 7; return &v }
	r.DisaggRequestID, r.Streamed, r.FinishReason, r.Tokens = 18868244560898, true, "length", phase.Tokens{Prompt: 81, Output: 46}
	if role == phase.Disagg {
		r.Stamps = phase.Stamps{
			ReceiveNS: at(0), ParsedNS: at(42), AdmittedNS: at(44), PlacedNS: at(49), GenPrepareNS: at(51), GenDispatchNS: at(58), GenHeadersNS: at(2396), CtxPrepareNS: at(2397),
			CtxDispatchNS: at(2401), CtxDoneNS: at(20668), FirstTokenNS: at(22227), FirstTokenSentNS: at(22228), LastTokenNS: at(52458), EndNS: at(54128),
		}
		age := int64(169_292_209)
		r.Decision = &phase.Decision{Policy: "least_loaded", Ctx: "ctx0", Gen: "gen0", Reason: "least_loaded among 2 ctx, 2 gen"}
		for i, n := range []string{"ctx0", "ctx1", "gen0", "gen1"} {
			r.Decision.Candidates = append(r.Decision.Candidates, phase.Candidate{Node: n, Score: 281.5 + float64(i), Running: i, LoadAgeNS: &age, QueuedTokens: 281, Reserved: 2})
		}
		r.Legs = []phase.Leg{{Role: phase.Gen, Node: "gen0", Records: true}, {Role: phase.Ctx, Node: "ctx0", Records: true}}
		return r
	}
	pushed := int64(0)
	r.PushedOffsetNS, r.KV = &pushed, &infer.KVCounts{AllocTotalBlocks: 4, AllocNewBlocks: 4, MissedBlocks: 2}
	r.Clocks[0].Estimate = &clock.Estimate{Reference: kernel + "00000001", Local: r.Instance, LowerNS: -300, UpperNS: 300, State: clock.Identity}
	r.Transfer = &phase.Transfer{Bytes: 331776, Frames: 4, Tokens: 81, RequestedNS: at(2335), StartNS: at(6862), LastByteNS: at(19928), InstalledNS: at(20007), WireNS: 829941, InstallNS: 367315}
	if role == phase.Ctx {
		r.Transfer.Peer, r.Transfer.RequestedNS, r.Transfer.StartNS = "gen0", at(3010), at(6362)
		r.Transfer.InstalledNS = at(22500) // acknowledged
		r.Stamps = phase.Stamps{
			ReceiveNS: at(2877), ParsedNS: at(2920), StartedNS: at(2932), QueuedNS: at(2937), AdmittedNS: at(2937), FirstScheduledNS: at(3119), FirstTokenNS: at(20393),
			LastTokenNS: at(20393), EndNS: at(20542),
		}
		r.Chunks = []infer.Chunk{{Iter: 4, Tokens: 81, BatchSize: 2, ForwardStartNS: *at(3128), ForwardEndNS: *at(20114), SampleEndNS: *at(20121)}}
		r.Iters = &phase.Iters{First: 4, Last: 4}
		return r
	}
	r.Transfer.Peer, r.Iters = "ctx0", &phase.Iters{First: 2, Last: 47}
	r.Stamps = phase.Stamps{
		ReceiveNS: at(1234), ParsedNS: at(1264), StartedNS: at(1274), QueuedNS: at(2323), AdmittedNS: at(2346), HeadersSentNS: at(2346), FirstScheduledNS: at(20794), FirstTokenNS: at(20782),
		FirstTokenSentNS: at(22145), LastTokenNS: at(50186), EndNS: at(52507),
	}
	return r
}

func cpu() time.Duration {
	var u syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkFromStream takes requests of three records each from a JetStream server in another process to lines on disk, with
// the router's own setting of the garbage collector. CPU is that of this process: run it with -cpu 1.
func BenchmarkFromStream(b *testing.B) {
	const requests = 20_000
	defer debug.SetGCPercent(debug.SetGCPercent(400))
	ctx, cancel := context.WithTimeout(b.Context(), 5*time.Minute)
	defer cancel()
	conn, err := bus.Connect(ctx, bus.Options{URL: natsProcess(b), Logger: quiet})
	if err != nil {
		b.Fatal(err)
	}
	defer conn.Close()
	if err := conn.Ready(ctx); err != nil {
		b.Fatal(err)
	}
	subject := bus.PhaseSubject("r0", phase.Ctx, "ctx0")
	wires := [][]byte{wireOf(phase.Ctx), wireOf(phase.Gen), wireOf(phase.Disagg)}
	round := 0
	var used, wall time.Duration
	var lineBytes float64
	for b.Loop() {
		round++
		for i := range requests {
			id := fmt.Appendf(nil, "%02d%06d", round, i)
			for _, w := range wires {
				_, err := conn.JetStream().PublishMsgAsync(&nats.Msg{Subject: subject, Data: bytes.ReplaceAll(w, []byte("aaaaaaaa"), id)}, jetstream.WithStallWait(time.Minute))
				if err != nil {
					b.Fatal(err)
				}
			}
		}
		<-conn.JetStream().PublishAsyncComplete()
		done, n := make(chan struct{}), 0
		c, err := New(Options{Router: "r0", Dir: b.TempDir(), Conn: conn, Logger: quiet, OnLine: func(l *timeline.Line) {
			if n++; n == requests {
				lineBytes = float64(len(timeline.Append(nil, l)) + 1)
				close(done)
			}
		}})
		if err != nil {
			b.Fatal(err)
		}
		run, stop := context.WithCancel(ctx)
		end := make(chan error, 1)
		before, begin := cpu(), time.Now()
		go func() { end <- c.Run(run) }()
		select {
		case <-done:
		case <-ctx.Done():
			b.Fatal(ctx.Err())
		}
		used, wall = used+cpu()-before, wall+time.Since(begin)
		stop()
		if err := <-end; err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(round*requests)/used.Seconds(), "requests/cpu-s")
	b.ReportMetric(float64(round*requests)/wall.Seconds(), "requests/s")
	b.ReportMetric(lineBytes, "B/line")
}

// BenchmarkPendingMemory measures what 100,000 requests hold of which two records are there and the router's is not.
func BenchmarkPendingMemory(b *testing.B) {
	const requests = 100_000
	for b.Loop() {
		c, err := New(Options{Router: "r0", Dir: b.TempDir(), Logger: quiet})
		if err != nil {
			b.Fatal(err)
		}
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		wires, known := [][]byte{wireOf(phase.Ctx), wireOf(phase.Gen)}, words{}
		for i := range requests {
			id := fmt.Appendf(nil, "%08d", i)
			for _, w := range wires {
				r, err := phase.Parse(bytes.ReplaceAll(w, []byte("aaaaaaaa"), id))
				if err != nil {
					b.Fatal(err)
				}
				known.detach(r)
				c.take(message{rec: r, ack: streamAck{reply: fmt.Sprintf("$JS.ACK.MERIDIAN_PHASES.router-r0.1.%d.%d.1795984421221772067.0", i, i)}})
			}
		}
		runtime.GC()
		runtime.ReadMemStats(&after)
		if len(c.open) != requests {
			b.Fatalf("%d requests are open, want %d", len(c.open), requests)
		}
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/1e6, "MB-held")
	}
}
