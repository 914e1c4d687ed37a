package device

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"meridian.internal/gpu/ranks"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
)

// places are where ranks and stages run.
type places struct {
	Device    string
	Ranks, PP int
	GPUs      []int
	Processes bool
	Hang      bool // ranks that are processes never become ready
}

// placesClock is the clock of the node.
var placesClock = clock.MakeID(1, 2)

func (p places) options() Options {
	return defaults(func(o *Options) {
		o.Device, o.Ranks, o.PP, o.GPUs, o.RankProcesses, o.ClockID = p.Device, p.Ranks, p.PP, p.GPUs, p.Processes, placesClock
		if o.MaxWaiting = 64; p.Device == "cuda" {
			o.Deterministic, o.MemoryFraction = true, 0.5
		}
	})
}

const placesVariable = "MERIDIAN_TEST_PLACES"

func (p places) open(ctx context.Context, t *testing.T) (*Device, error) {
	text, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(placesVariable, string(text))
	return Open(ctx, p.options(), now, slog.New(slog.DiscardHandler))
}

// TestMain makes this program the process of a rank when a device has started it as that.
func TestMain(m *testing.M) {
	rank, ok := strings.CutPrefix(os.Args[len(os.Args)-1], "--rank=")
	if !ok {
		os.Exit(m.Run())
	}
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT)
	if err := serveRank(rank); err != nil {
		fmt.Fprintln(os.Stderr, "rank:", err)
		os.Exit(1)
	}
}

func serveRank(rank string) error {
	var p places
	if err := json.Unmarshal([]byte(os.Getenv(placesVariable)), &p); err != nil {
		return err
	}
	if p.Hang {
		select {}
	}
	o := p.options()
	var err error
	if o.Rank, err = strconv.Atoi(rank); err != nil {
		return err
	}
	steady, err := clock.New(clock.Options{})
	if err != nil {
		return err
	}
	return ServeRank(context.Background(), o, steady, "", slog.New(slog.NewTextHandler(os.Stderr, nil)))
}

func TestRanksThatAreProcessesGiveTheTextsOfOneDevice(t *testing.T) {
	var want [][]int32
	for _, p := range []places{{Ranks: 1, PP: 1}, {Ranks: 2, PP: 1, Processes: true}, {Ranks: 2, PP: 2, Processes: true}} {
		p.Device = "cpu"
		d, err := p.open(t.Context(), t)
		if err != nil {
			t.Fatalf("%+v: %v", p, err)
		}
		if n := len(d.RankClocks()); p.Processes && n != p.Ranks-1 {
			t.Errorf("%+v: %d processes", p, n)
		}
		got := textsOf(t, d)
		if want == nil {
			want = got
		}
		for i := range want {
			if !slices.Equal(got[i], want[i]) {
				t.Errorf("%+v: request %d gives %v, want %v", p, i, got[i], want[i])
			}
		}
	}
}

// A node that is told to end while a rank loads, or hangs, does not wait for it, and leaves no process behind.
func TestTheEndOfANodeIsTheEndOfWaitingForItsRanks(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	d, err := places{Device: "sim", Ranks: 2, PP: 1, Processes: true, Hang: true}.open(ctx, t)
	if d != nil || !errors.Is(err, context.Canceled) {
		t.Errorf("device %v, error %v", d, err)
	}
	if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); !errors.Is(err, syscall.ECHILD) {
		t.Errorf("process %d is left, error %v", pid, err)
	}
}

// textsOf runs 24 requests, greedy and seeded, and closes the device.
func textsOf(t *testing.T, d *Device) [][]int32 {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- d.Engine.Run(ctx) }()
	out := make([][]int32, 24)
	var running []ranks.Sequence
	for i := range out {
		r := infer.Request{ID: int64(i + 1), MaxTokens: 20 + i, IgnoreEOS: true}
		for k := range 3 + 17*i {
			r.Prompt = append(r.Prompt, int32((k*k*7+k*31+i*13)%d.Model.Config.Vocab))
		}
		if i%2 == 1 {
			r.Sampling = infer.Sampling{Temperature: 0.9, TopK: 30, Seed: uint64(i), PresencePenalty: 0.2}
		}
		s, err := d.Engine.Submit(r)
		if err != nil {
			t.Fatal(err)
		}
		running = append(running, s)
	}
	for i, s := range running {
		for done := (*infer.Done)(nil); done == nil; {
			var tokens []infer.Token
			var err error
			if tokens, done, err = s.Next(t.Context()); err != nil {
				t.Fatalf("request %d: %v", i, err)
			}
			for _, token := range tokens {
				out[i] = append(out[i], token.ID)
			}
		}
	}
	cancel()
	if err := errors.Join(<-ran, d.Close()); err != nil {
		t.Error(err)
	}
	return out
}
