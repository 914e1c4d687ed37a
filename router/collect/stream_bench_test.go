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

// wireOf is a record of a request as it travels, with id in place of eight letters.
func wireOf(role phase.Role) []byte { return phase.Append(nil, rec(role, "aaaaaaaa")) }

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
		c, err := New(Options{Router: "r0", Dir: b.TempDir(), Conn: conn, Logger: quiet, OnLine: func(*timeline.Line) {
			if n++; n == requests {
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
