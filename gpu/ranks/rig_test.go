package ranks

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

// rig is a running group on simulated devices.
type rig struct {
	*Group
	t    testing.TB
	rows []rows.Row
	made func(*Group) // called before it runs; may be nil
	stop func()       // ends group and devices and checks the books
	runs error        // what Run is expected to return

	ended chan error // what it has returned
}

func newRig(t testing.TB, ranks int, o Options, dev sim.Config) *rig {
	t.Helper()
	devices := make([]sim.Config, ranks)
	for i := range devices {
		devices[i] = dev
	}
	return newRigOf(t, o, devices)
}

// newRigOf makes a group whose devices differ.
func newRigOf(t testing.TB, o Options, devices []sim.Config) *rig {
	t.Helper()
	return (&rig{t: t}).open(o, devices)
}

func (r *rig) open(o Options, devices []sim.Config) *rig {
	t := r.t
	t.Helper()
	start := time.Now()
	now := func() int64 { return int64(time.Since(start)) + 1 }
	o.Engine.Now = now
	o.Sink.Put = func(row *rows.Row) { r.rows = append(r.rows, *row) }
	for _, dev := range devices {
		dev.Now = now
		d, err := sim.New(dev)
		if err != nil {
			t.Fatal(err)
		}
		o.Backends = append(o.Backends, d)
	}
	return r.start(o)
}

// info is that of rank 0's device.
func (r *rig) info() backend.Info { return r.ranks[0].(local).Engine.Info() }

func (r *rig) start(o Options) *rig {
	t := r.t
	t.Helper()
	g, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	r.Group = g
	if r.made != nil {
		r.made(g)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.ended = make(chan error, 1)
	go func() { r.ended <- g.Run(ctx) }()
	stopped := false
	r.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-r.ended; !errors.Is(err, r.runs) {
			t.Errorf("Run: %v, want %v", err, r.runs)
		}
		for _, d := range o.Backends {
			if err := d.Close(); err != nil {
				t.Error(err)
			}
		}
		if err := g.Check(); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(r.stop)
	return r
}

// finish reads a sequence to its end.
func finish(s Sequence) (ids []int32, done infer.Done, err error) {
	for {
		tokens, d, err := s.Next(context.Background())
		if err != nil {
			return ids, done, err
		}
		for _, t := range tokens {
			ids = append(ids, t.ID)
		}
		if d != nil {
			return ids, *d, nil
		}
	}
}

// requests are prompts that begin alike in part, greedy and seeded.
func requests(random *rand.Rand, n, vocab int) []infer.Request {
	out := make([]infer.Request, n)
	for i := range out {
		r := infer.Request{ID: int64(i + 1), MaxTokens: 1 + random.IntN(24), IgnoreEOS: true, Prompt: make([]int32, 1+random.IntN(150))}
		family := int32(random.IntN(5))
		for k := range r.Prompt {
			r.Prompt[k] = (family*31 + int32(k)*7) % int32(vocab)
		}
		if cut := random.IntN(len(r.Prompt)); random.IntN(2) == 0 {
			for k := cut; k < len(r.Prompt); k++ {
				r.Prompt[k] = random.Int32N(int32(vocab))
			}
		}
		if random.IntN(2) == 0 {
			r.Sampling = infer.Sampling{Temperature: 0.8, TopK: 20, Seed: random.Uint64(), PresencePenalty: 0.3}
		}
		out[i] = r
	}
	return out
}

// texts are what one engine gives for the requests, each alone.
func texts(t testing.TB, list []infer.Request, dev sim.Config) [][]int32 {
	t.Helper()
	r := newRig(t, 1, Options{}, dev)
	defer r.stop()
	out := make([][]int32, len(list))
	for i, req := range list {
		s, err := r.Submit(req)
		if err != nil {
			t.Fatal(err)
		}
		if out[i], _, err = finish(s); err != nil {
			t.Fatal(err)
		}
	}
	return out
}
