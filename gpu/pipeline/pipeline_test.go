package pipeline

import (
	"bytes"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/backendtest"
	"meridian.internal/gpu/cpu"
	"meridian.internal/gpu/model"
	"meridian.internal/gpu/sim"
)

func clock() func() int64 {
	start := time.Now()
	return func() int64 { return int64(time.Since(start)) + 1 }
}

// stages cuts so many layers.
func stages(layers, n int) []backend.Stage {
	out := make([]backend.Stage, n)
	for i := range out {
		out[i] = backend.Stage{First: layers * i / n, End: layers * (i + 1) / n}
	}
	return out
}

// ofSim makes a pipeline of simulated devices.
func ofSim(t testing.TB, cfg sim.Config, n int) *Pipeline {
	t.Helper()
	cfg.Layers = max(cfg.Layers, 4)
	if cfg.Now == nil {
		cfg.Now = clock()
	}
	return ofStages(t, cfg.Layers, n, func(st backend.Stage) (backend.Backend, error) {
		cfg.Stage = st
		return sim.New(cfg)
	})
}

// ofStages makes a pipeline of n devices.
func ofStages(t testing.TB, layers, n int, open func(backend.Stage) (backend.Backend, error)) *Pipeline {
	t.Helper()
	var all []backend.Backend
	for _, st := range stages(layers, n) {
		d, err := open(st)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, d)
	}
	p, err := New(all...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestConformance(t *testing.T) {
	m, err := model.Load("")
	if err != nil {
		t.Fatal(err)
	}
	now := clock()
	for name, open := range map[string]func(t *testing.T) *Pipeline{
		"sim, 1 stage":  func(t *testing.T) *Pipeline { return ofSim(t, sim.Config{}, 1) },
		"sim, 3 stages": func(t *testing.T) *Pipeline { return ofSim(t, sim.Config{Layers: 7}, 3) },
		"sim, 4 stages with cost": func(t *testing.T) *Pipeline {
			return ofSim(t, sim.Config{Cost: sim.Cost{Step: 20_000, PrefillToken: 500, Decode: 1000, CopyByte: 0.1}}, 4)
		},
		"cpu, 2 stages": func(t *testing.T) *Pipeline {
			return ofStages(t, m.Config.Layers, 2, func(st backend.Stage) (backend.Backend, error) {
				return cpu.New(m, cpu.Options{Stage: st, Threads: 1, Now: now})
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			backendtest.Run(t, backendtest.Options{Open: func(t *testing.T, _ backend.Stage) backend.Backend { return open(t) }})
		})
	}
}

func TestStagesMustBeTheLayersInOrder(t *testing.T) {
	device := func(first, end int) backend.Backend {
		d, err := sim.New(sim.Config{Layers: 4, Stage: backend.Stage{First: first, End: end}, Now: clock()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = d.Close() })
		return d
	}
	for name, list := range map[string][]backend.Backend{
		"no stage":                   nil,
		"the one before ends at 1":   {device(0, 1), device(2, 4)},
		"the stages end at layer 3":  {device(0, 1), device(1, 3)},
		"stage 0 owns layers [1, 4)": {device(1, 4)},
		"the one before ends at 3":   {device(0, 3), device(2, 4)},
	} {
		if _, err := New(list...); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("got %v, want %q", err, name)
		}
	}
}

func TestAStageThatFailsIsNamedAndTheStepsAfterItRun(t *testing.T) {
	now := clock()
	var all []backend.Backend
	for i, st := range stages(4, 2) {
		cfg := sim.Config{Layers: 4, Stage: st, Now: now}
		if i == 1 {
			cfg.Fail = func(iter int64) error {
				if iter == 2 {
					return errors.New("it burns")
				}
				return nil
			}
		}
		d, err := sim.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, d)
	}
	p, err := New(all...)
	if err != nil {
		t.Fatal(err)
	}
	var steps []*backend.Step
	for i := range 3 {
		steps = append(steps, p.Submit(&backend.Batch{Iter: int64(i + 1), Assign: []backend.Assign{{}},
			Entries: []backend.Entry{{Tokens: []int32{1, 2}, Blocks: []int32{0}, Logits: []int{1}}}}))
	}
	for i, s := range steps {
		<-s.Done()
		if (s.Err != nil) != (i == 1) || s.Err != nil && !strings.Contains(s.Err.Error(), "stage 1: it burns") {
			t.Errorf("step %d: %v", i+1, s.Err)
		}
		if len(s.Stages) != 2 {
			t.Errorf("step %d has stamps of %d stages", i+1, len(s.Stages))
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	s := p.Submit(&backend.Batch{})
	if <-s.Done(); !errors.Is(s.Err, backend.ErrClosed) {
		t.Errorf("after Close: %v", s.Err)
	}
}

// counted is a stage whose hidden states tell how many of them are held.
type counted struct {
	backend.Backend
	held atomic.Int64
}

type held struct {
	backend.Hidden
	by *counted
}

func (h held) Release() {
	h.by.held.Add(-1)
	h.Hidden.Release()
}

func (c *counted) Submit(b *backend.Batch) *backend.Step {
	if h, ok := b.Hidden.(held); ok {
		in := *b
		in.Hidden = h.Hidden
		b = &in
	}
	inner, outer := c.Backend.Submit(b), backend.NewStep(b.Iter)
	go func() {
		<-inner.Done()
		outer.Outputs, outer.Stamps, outer.Err = inner.Outputs, inner.Stamps, inner.Err
		if inner.Hidden != nil {
			c.held.Add(1)
			outer.Hidden = held{inner.Hidden, c}
		}
		outer.Finish()
	}()
	return outer
}

func TestHiddenStatesAreGivenBackAlsoByStepsThatFail(t *testing.T) {
	now := clock()
	var all []backend.Backend
	for i, st := range stages(6, 3) {
		cfg := sim.Config{Layers: 6, Stage: st, Now: now, KVBlocks: 64 + 10*(2-i)}
		if i == 1 {
			cfg.Fail = func(iter int64) error {
				if iter%3 == 0 {
					return errors.New("it burns")
				}
				return nil
			}
		}
		d, err := sim.New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, &counted{Backend: d})
	}
	p, err := New(all...)
	if err != nil {
		t.Fatal(err)
	}
	if n := p.Info().KVBlocks; n != 64 {
		t.Errorf("%d KV blocks, want those of the stage with the fewest, 64", n)
	}
	var steps []*backend.Step
	for i := range 9 {
		steps = append(steps, p.Submit(&backend.Batch{Iter: int64(i + 1), Assign: []backend.Assign{{}},
			Entries: []backend.Entry{{Tokens: []int32{1, 2}, Blocks: []int32{0}, Logits: []int{1}}}}))
	}
	for i, s := range steps {
		if <-s.Done(); (s.Err != nil) != ((i+1)%3 == 0) {
			t.Errorf("step %d: %v", i+1, s.Err)
		}
	}
	for i, d := range all {
		if n := d.(*counted).held.Load(); n != 0 {
			t.Errorf("%d hidden states of stage %d were not given back", n, i)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

func TestKVCopiesAreSplitByLayers(t *testing.T) {
	p, one := ofSim(t, sim.Config{}, 3), ofSim(t, sim.Config{}, 1)
	defer p.Close()
	defer one.Close()
	b := func() *backend.Batch {
		return &backend.Batch{Iter: 1, Assign: []backend.Assign{{}}, Entries: []backend.Entry{{Tokens: make([]int32, 40), Blocks: []int32{3, 1}, Logits: []int{39}}}}
	}
	for _, d := range []*Pipeline{p, one} {
		<-d.Submit(b()).Done()
	}
	regions := []backend.Region{
		{Block: 3, LayerTo: 4, HeadTo: 2, TokenTo: 32}, {Block: 1, LayerFrom: 1, LayerTo: 3, HeadFrom: 1, HeadTo: 2, TokenFrom: 2, TokenTo: 8},
	}
	size := 4*2*32*2*2*4 + 2*2*6*1*2*4
	got, want := make([]byte, size), make([]byte, size)
	for d, buf := range map[*Pipeline][]byte{p: got, one: want} {
		c := d.CopyOut(regions, buf)
		if <-c.Done(); c.Err != nil || c.EndNS < c.StartNS || c.StartNS == 0 {
			t.Fatalf("%+v", c)
		}
	}
	if !bytes.Equal(got, want) {
		t.Error("the stages together give other bytes than the whole")
	}
	for name, bad := range map[string]struct {
		regions []backend.Region
		size    int
	}{
		"there are 4":        {[]backend.Region{{LayerTo: 5, HeadTo: 2, TokenTo: 1}}, 10},
		"more than":          {[]backend.Region{{LayerTo: 4, HeadTo: 2, TokenTo: 1}}, 10},
		"4 more than":        {[]backend.Region{{LayerTo: 4, HeadTo: 2, TokenTo: 1}}, 4*2*2*2*4 + 4},
		"pipeline: stage 0:": {[]backend.Region{{Block: 1 << 20, LayerTo: 4, HeadTo: 2, TokenTo: 1}}, 4 * 2 * 2 * 2 * 4},
	} {
		c := p.CopyIn(bad.regions, make([]byte, bad.size))
		if <-c.Done(); c.Err == nil || !strings.Contains(c.Err.Error(), name) {
			t.Errorf("got %v, want %q", c.Err, name)
		}
	}
}
