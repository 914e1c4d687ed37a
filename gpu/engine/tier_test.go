package engine

import (
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
)

// served is what a load of shared prefixes cost, in simulated time.
type served struct {
	hitRate float64 // prompt tokens that were not computed, of all
	took    time.Duration
	texts   [][]int32
}

// serve sends 400 requests, four at a time, each with one of 16 prefixes of 256 tokens and an end of its own. Together the
// prefixes fill 256 blocks of 16 tokens.
func serve(t *testing.T, blocks int, hostBytes int64) (s served) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{Overlap: true, PrefixReuse: true, MaxBatchSize: 4, HostKVBytes: hostBytes}, sim.Config{
			TokensPerBlock: 16, KVBlocks: blocks, Shallow: true, Vocab: 30000,
			Cost: sim.Cost{Step: 200_000, PrefillToken: 10_000, Decode: 10_000, CopyByte: 0.2},
		})
		defer r.stop()
		rng := rand.New(rand.NewPCG(1, 2))
		start, cached, prompt := time.Now(), 0, 0
		for range 100 {
			var seqs []*Sequence
			for range 4 {
				req := request(256, rng.Int32N(16), 4)
				req.Prompt = append(req.Prompt, rng.Int32N(1000), rng.Int32N(1000))
				s, err := r.Submit(req)
				if err != nil {
					t.Fatal(err)
				}
				seqs = append(seqs, s)
			}
			for _, q := range seqs {
				res := r.finish(q)
				cached += res.done.Report.CachedTokens
				prompt += res.done.Report.PromptTokens
				s.texts = append(s.texts, res.ids)
			}
		}
		s.hitRate, s.took = float64(cached)/float64(prompt), time.Since(start)
	})
	return s
}

func TestAHostTierServesAWorkingSetOfTwiceTheDevice(t *testing.T) {
	all, half, tiered := serve(t, 600, 0), serve(t, 128, 0), serve(t, 128, 64<<20)
	t.Logf("hit rate %.3f unlimited, %.3f with a host tier, %.3f without; time %v, %v, %v", all.hitRate, tiered.hitRate, half.hitRate, all.took, tiered.took, half.took)
	if tiered.hitRate < all.hitRate-0.03 {
		t.Errorf("hit rate %.3f with a host tier, want within 3 points of %.3f", tiered.hitRate, all.hitRate)
	}
	if ratio := float64(half.took) / float64(tiered.took); ratio < 1.5 {
		t.Errorf("a host tier is %.2f times as fast as none, want 1.5", ratio)
	}
	for i := range all.texts {
		sameText(t, "with a host tier", tiered.texts[i], all.texts[i])
	}
}

func TestHostMemoryThatIsRefusedIsAnErrorAtTheStart(t *testing.T) {
	dev, err := sim.New(sim.Config{TokensPerBlock: 1 << 14, KVBlocks: 4, ContextLen: 1 << 14, Now: clock()})
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	const more = 1 << 48 // than any process can address
	_, err = New(Config{Now: clock(), PrefixReuse: true, HostKVBytes: more}, dev)
	if !errors.Is(err, unix.ENOMEM) || !strings.Contains(err.Error(), "bytes of host memory for KV") {
		t.Errorf("%v, want one that says what was refused", err)
	}
	e, err := New(Config{Now: clock(), PrefixReuse: true, HostKVBytes: 64 << 20}, dev)
	if err != nil || len(e.tiers.host[0]) == 0 {
		t.Fatalf("%v, want host memory", err)
	}
	e.tiers.close()
}

// failingCopies is a device whose copies can fail.
type failingCopies struct {
	backend.Backend
	in, out atomic.Bool
}

func (f *failingCopies) CopyIn(regions []backend.Region, src []byte) *backend.Copy {
	if f.in.Load() {
		return failed()
	}
	return f.Backend.CopyIn(regions, src)
}

func (f *failingCopies) CopyOut(regions []backend.Region, dst []byte) *backend.Copy {
	if f.out.Load() {
		return failed()
	}
	return f.Backend.CopyOut(regions, dst)
}

func failed() *backend.Copy {
	c := backend.NewCopy()
	c.Err = errors.New("the bus is gone")
	c.Finish()
	return c
}

func TestAFailedLoadIsComputed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dev, err := sim.New(sim.Config{TokensPerBlock: 4, KVBlocks: 16, Now: clock(), Cost: sim.Cost{Step: 1e5}})
		if err != nil {
			t.Fatal(err)
		}
		broken := &failingCopies{Backend: dev}
		r := newRigOn(t, Config{PrefixReuse: true, HostKVBytes: 1 << 20}, broken)
		defer r.stop()
		first := r.run(request(24, 1, 6))
		time.Sleep(time.Millisecond) // copied to the host
		r.run(request(40, 2, 20))    // evicts it
		broken.in.Store(true)
		again := r.run(request(24, 1, 6))
		sameText(t, "after a failed load", again.ids, first.ids)
		if s := r.pool.Stats(); s.Host.Stored == 0 || s.Loaded != 0 || again.done.Report.CachedTokens >= 20 {
			t.Errorf("%d blocks offloaded, %d loaded, %d tokens cached", s.Host.Stored, s.Loaded, again.done.Report.CachedTokens)
		}
		broken.in.Store(false)
		broken.out.Store(true)
		r.run(request(40, 3, 20))
		synctest.Wait()
		if err := r.Check(); err != nil {
			t.Error(err)
		}
	})
}

func TestACancelDuringALoadGivesAllBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{PrefixReuse: true, HostKVBytes: 1 << 20}, sim.Config{TokensPerBlock: 4, KVBlocks: 16, Cost: sim.Cost{Step: 1e5, CopyByte: 1000}})
		defer r.stop()
		r.run(request(24, 1, 6))
		time.Sleep(time.Second)
		r.run(request(40, 2, 20))
		s, err := r.Submit(request(24, 1, 6))
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Microsecond)
		synctest.Wait()
		s.Cancel()
		if res := r.finish(s); res.done.Reason != infer.FinishCancelled || len(res.ids) > 0 {
			t.Errorf("%s after %d tokens", res.done.Reason, len(res.ids))
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if l := r.Load(); l.KVUsedBlocks != 0 {
			t.Errorf("%d blocks are used at idle", l.KVUsedBlocks)
		}
		if r.pool.Stats().Loaded == 0 {
			t.Error("nothing was loaded: the test proves nothing")
		}
		if err := r.Check(); err != nil {
			t.Error(err)
		}
	})
}
