//go:build cuda

package cuda

import (
	gocontext "context"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"meridian.internal/gpu/engine"
	"meridian.internal/shared/infer"
)

// freeBytes is how much of card 0's memory nobody holds.
func freeBytes(t *testing.T) uint64 {
	t.Helper()
	c, err := openContext(0)
	if errors.Is(err, ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	var free, total uint64
	if err := errors.Join(c.do("cuMemGetInfo_v2", uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total))), c.close()); err != nil {
		t.Fatal(err)
	}
	return free
}

// TestRandomLoadLeavesNothingOnTheCard runs requests with cancellations, deadlines and preemptions, for a few seconds or
// MERIDIAN_CARD_LOAD. The first half brings graphs, plans and buffers; the second may take no more of the card's memory, and
// in the end all of it is back.
func TestRandomLoadLeavesNothingOnTheCard(t *testing.T) {
	span := 6 * time.Second
	if s := os.Getenv("MERIDIAN_CARD_LOAD"); s != "" {
		var err error
		if span, err = time.ParseDuration(s); err != nil {
			t.Fatalf("MERIDIAN_CARD_LOAD %q: %v", s, err)
		}
	}
	m := randomModel(t, "LlamaForCausalLM", fusedShape)
	shut(t, open(t, m, Options{})) // what libraries keep for the process is there from now on
	keep, err := openContext(0)    // the context stays while the test looks at the card's memory
	if err != nil {
		t.Fatal(err)
	}
	defer keep.close()
	before := freeBytes(t)
	b := open(t, m, Options{TokensPerBlock: 16, KVBlocks: 150, MaxSlots: 24, MaxTokens: 256}) // too few blocks for all: some are preempted
	e, err := engine.New(engine.Config{Overlap: true, PrefixReuse: true, MaxBatchSize: 24, MaxNumTokens: 256, MaxWaiting: 64, HostKVBytes: 8 << 20, Now: now}, b)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := gocontext.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- e.Run(ctx) }()
	l := &cardLoad{t: t, e: e}
	l.run(span/2, 1)
	warm := freeBytes(t)
	l.run(span/2, 2)
	grown := int64(warm) - int64(freeBytes(t))
	cancel()
	if err := errors.Join(<-ran, e.Check()); err != nil {
		t.Error(err)
	}
	shut(t, b)
	kept := int64(before) - int64(freeBytes(t))
	t.Logf("%v: %d requests, %d cancelled, %d expired, %d preemptions, %d steps; the second half took %d bytes of the card, %d are kept after the end",
		span, l.requests.Load(), l.cancelled.Load(), l.expired.Load(), l.preempted.Load(), e.Load().Iter, grown, kept)
	const slack = 16 << 20 // the driver takes memory in pieces
	if grown > slack || kept > slack {
		t.Errorf("the card's memory is not given back")
	}
	if l.requests.Load() == 0 || l.cancelled.Load() == 0 || l.preempted.Load() == 0 {
		t.Error("the test proves less than it should")
	}
	if n := e.LeakedBlocks(); n != 0 {
		t.Errorf("%d KV blocks leaked", n)
	}
}

// cardLoad sends random requests from many clients.
type cardLoad struct {
	t                                       *testing.T
	e                                       *engine.Engine
	requests, cancelled, expired, preempted atomic.Int64
}

func (l *cardLoad) run(span time.Duration, seed uint64) {
	var clients sync.WaitGroup
	end := now() + int64(span)
	for client := range uint64(40) {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(seed, client))
			for now() < end {
				l.one(rng)
			}
		})
	}
	clients.Wait()
	load := l.e.Load()
	for limit := now() + int64(time.Minute); load.Running+load.Waiting+load.KVUsedBlocks > 0 && now() < limit; load = l.e.Load() {
		time.Sleep(time.Millisecond) // the last step is on its way yet
	}
	if load.Running+load.Waiting+load.KVUsedBlocks > 0 {
		l.t.Errorf("load at idle: %+v", load)
	}
}

func (l *cardLoad) one(rng *rand.Rand) {
	r := infer.Request{ID: l.requests.Add(1), MaxTokens: 1 + rng.IntN(120), IgnoreEOS: true, Priority: rng.IntN(3) - 1, Prompt: make([]int32, 1+rng.IntN(300))}
	for k := range r.Prompt { // prompts begin alike
		r.Prompt[k] = int32(k * 7 % 200)
		if k > 50 {
			r.Prompt[k] = rng.Int32N(200)
		}
	}
	if rng.IntN(2) == 0 {
		r.Sampling = infer.Sampling{Temperature: 1, TopP: 0.9, Seed: rng.Uint64(), FrequencyPenalty: 0.1, Logprobs: rng.IntN(2) == 0}
	}
	if rng.IntN(10) == 0 {
		r.DeadlineNS = now() + rng.Int64N(50e6)
	}
	s, err := l.e.Submit(r)
	if err != nil {
		if !errors.Is(err, engine.ErrQueueFull) && !errors.Is(err, engine.ErrDeadline) {
			l.t.Errorf("request %d: %v", r.ID, err)
		}
		return
	}
	cancelAfter := -1
	if rng.IntN(4) == 0 {
		cancelAfter = rng.IntN(r.MaxTokens + 1)
	}
	ctx, stop := gocontext.WithTimeout(gocontext.Background(), time.Minute) // no measurement: a hang is to fail
	defer stop()
	for got := 0; ; {
		if cancelAfter >= 0 && got >= cancelAfter {
			s.Cancel()
		}
		tokens, done, err := s.Next(ctx)
		if err != nil {
			l.t.Errorf("request %d is stuck after %d tokens: %v", r.ID, got, err)
			return
		}
		got += len(tokens)
		if done == nil {
			continue
		}
		l.preempted.Add(int64(done.Report.Preemptions))
		switch {
		case errors.Is(done.Err, engine.ErrCancelled):
			l.cancelled.Add(1)
		case errors.Is(done.Err, engine.ErrDeadline):
			l.expired.Add(1)
		case done.Err != nil || got != r.MaxTokens:
			l.t.Errorf("request %d: %d of %d tokens, %v", r.ID, got, r.MaxTokens, done.Err)
		}
		return
	}
}
