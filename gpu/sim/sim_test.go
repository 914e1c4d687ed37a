package sim

import (
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/backendtest"
)

func clock() func() int64 {
	start := time.Now()
	return func() int64 { return int64(time.Since(start)) + 1 }
}

func TestConformance(t *testing.T) {
	for name, cfg := range map[string]Config{
		"without cost": {},
		"with cost":    {Cost: Cost{Step: 20_000, PrefillToken: 500, Decode: 1000, KVToken: 1, CopyByte: 0.1}},
		"odd shapes":   {Layers: 3, KVHeads: 3, HeadSize: 6, TokensPerBlock: 5, KVBlocks: 210, Vocab: 77},
		"shallow":      {Shallow: true},
		"windows":      {Windows: []int{0, 40, 7, 40}, WindowBlocks: 600},
		"all windows":  {Windows: []int{9, 9, 9, 9}},
		"exact":        {Exact: true, Cost: Cost{Step: 20_000, PrefillToken: 500, Decode: 1000, CopyByte: 0.1}},
	} {
		t.Run(name, func(t *testing.T) {
			backendtest.Run(t, backendtest.Options{Stages: true, Open: func(t *testing.T, stage backend.Stage) backend.Backend {
				c := cfg
				c.Now, c.Stage = clock(), stage
				d, err := New(c)
				if err != nil {
					t.Fatal(err)
				}
				return d
			}})
		})
	}
}

// device runs by hand what an engine would.
type device struct {
	*Device
	t      *testing.T
	blocks []int32
}

func open(t *testing.T, cfg Config) *device {
	t.Helper()
	cfg.Now = clock()
	d, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.Close() })
	return &device{d, t, []int32{4, 2, 7, 0}}
}

func (d *device) submit(b *backend.Batch) *backend.Step {
	step := d.Submit(b)
	<-step.Done()
	return step
}

func (d *device) run(b *backend.Batch) int32 {
	d.t.Helper()
	step := d.submit(b)
	if step.Err != nil {
		d.t.Fatal(step.Err)
	}
	return step.Outputs[0].Tokens[0]
}

func TestDamagedKVChangesTheText(t *testing.T) {
	prompt := make([]int32, 40)
	for i := range prompt {
		prompt[i] = int32(i)
	}
	region := func(block int32, layer, token int) backend.Region {
		return backend.Region{Block: block, LayerFrom: layer, LayerTo: layer + 1, HeadTo: 2, TokenFrom: token, TokenTo: token + 1}
	}
	damages := map[string]func(d *device){
		"none": func(*device) {},
		"one token of one layer is lost": func(d *device) {
			<-d.CopyIn([]backend.Region{region(4, 1, 3)}, make([]byte, 32)).Done()
		},
		"two tokens are swapped": func(d *device) {
			buf := make([]byte, 64)
			<-d.CopyOut([]backend.Region{region(4, 1, 3), region(2, 1, 5)}, buf).Done()
			<-d.CopyIn([]backend.Region{region(2, 1, 5), region(4, 1, 3)}, buf).Done()
		},
		"two heads are swapped": func(d *device) {
			a, b := region(4, 0, 3), region(4, 0, 3)
			a.HeadTo, b.HeadFrom = 1, 1
			buf := make([]byte, 32)
			<-d.CopyOut([]backend.Region{a, b}, buf).Done()
			<-d.CopyIn([]backend.Region{b, a}, buf).Done()
		},
		"two blocks are swapped": func(d *device) { d.blocks[0], d.blocks[1] = d.blocks[1], d.blocks[0] },
	}
	texts := map[string]int32{}
	for name, damage := range damages {
		d := open(t, Config{TokensPerBlock: 16})
		first := d.run(&backend.Batch{Assign: []backend.Assign{{}}, Entries: []backend.Entry{{Tokens: prompt, Blocks: d.blocks, Logits: []int{39}}}})
		damage(d)
		texts[name] = d.run(&backend.Batch{Entries: []backend.Entry{{Tokens: []int32{first}, KVLen: 40, Blocks: d.blocks, Logits: []int{0}}}})
	}
	for name, token := range texts {
		if name != "none" && token == texts["none"] {
			t.Errorf("%s: the next token is still %d", name, token)
		}
	}
}

func TestTimelineFollowsTheCostModel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, Config{Cost: Cost{Step: 1000, PrefillToken: 10, Decode: 100, KVToken: 1, CopyByte: 2}})
		defer d.Close()
		prefill := d.Submit(&backend.Batch{Assign: []backend.Assign{{}}, Entries: []backend.Entry{{Tokens: make([]int32, 50), Blocks: d.blocks}}})
		var ends []int64
		b := &backend.Batch{Entries: []backend.Entry{{Tokens: []int32{1}, KVLen: 50, Blocks: d.blocks, Logits: []int{0}}}}
		b.LayerDone = func(int) { ends = append(ends, d.cfg.Now()) }
		decode := d.Submit(b)
		<-prefill.Done()
		if st := prefill.Stamps; st.ForwardEndNS-st.ForwardStartNS != 1500 || d.cfg.Now() != st.ForwardEndNS {
			t.Errorf("prefill stamps %+v, now %d; want 1500 ns", st, d.cfg.Now())
		}
		<-decode.Done()
		if st := decode.Stamps; st.ForwardStartNS != prefill.Stamps.SampleEndNS || st.SampleEndNS-st.ForwardStartNS != 1150 {
			t.Errorf("decode stamps %+v, want 1150 ns right after %+v", st, prefill.Stamps)
		}
		if len(ends) != 4 || ends[0]-decode.Stamps.ForwardStartNS != 287 || ends[3] != decode.Stamps.ForwardEndNS {
			t.Errorf("layers ended at %v, want quarters of %+v", ends, decode.Stamps)
		}
		c := d.CopyOut([]backend.Region{{LayerTo: 1, HeadTo: 1, TokenTo: 1}}, make([]byte, 16))
		<-c.Done()
		if c.Err != nil || c.EndNS-c.StartNS != 32 {
			t.Errorf("copy took %d ns, error %v; want 32", c.EndNS-c.StartNS, c.Err)
		}
	})
}

// A device runs what is queued back to back, however late its goroutine comes to know that a step has ended.
func TestLateWakeUpsDoNotAddUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, Config{Cost: Cost{Step: 1e6}, Sleep: func(d time.Duration) { time.Sleep(d + 300*time.Microsecond) }})
		defer d.Close()
		time.Sleep(time.Millisecond)
		begin := d.cfg.Now()
		var steps []*backend.Step
		for i := range 20 {
			steps = append(steps, d.Submit(&backend.Batch{Iter: int64(i)}))
		}
		for i, s := range steps {
			<-s.Done()
			if want := begin + int64(i)*1e6; s.Stamps.ForwardStartNS != want || s.Stamps.SampleEndNS != want+1e6 {
				t.Errorf("step %d ran %+v, want 1 ms from %d on", i, s.Stamps, want)
			}
		}
		if took := d.cfg.Now() - begin; took < 20e6 || took > 20.3e6 {
			t.Errorf("20 steps took %d ns, want 20 ms and one late wake-up", took)
		}
		time.Sleep(time.Millisecond)
		begin = d.cfg.Now()
		if s := d.submit(&backend.Batch{}); s.Stamps.ForwardStartNS != begin {
			t.Errorf("a step on an idle device ran %+v, it was submitted at %d", s.Stamps, begin)
		}
	})
}

func TestAnExactDeviceIsNotAMillisecondLate(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("there are no timers of the kernel")
	}
	const cost = 300 * time.Microsecond
	d := open(t, Config{Cost: Cost{Step: float64(cost)}, Exact: true})
	for end := time.Now().Add(20 * time.Second); ; { // as long as others use the processors
		var late []time.Duration
		for range 100 {
			s := d.submit(&backend.Batch{})
			late = append(late, time.Duration(d.cfg.Now()-s.Stamps.SampleEndNS))
		}
		slices.Sort(late)
		if late[0] < 0 {
			t.Fatalf("a step was done %v before its end", -late[0])
		}
		early := late[len(late)/10]
		if early <= cost {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("9 of 10 steps of %v are late by more than %v", cost, early)
		}
	}
}

func TestBadWorkIsRefused(t *testing.T) {
	d := open(t, Config{Vocab: 100, ContextLen: 64, MaxSlots: 4, KVBlocks: 16, TokensPerBlock: 16})
	good := backend.Entry{Tokens: []int32{1}, Blocks: []int32{0}, Logits: []int{0}}
	for name, spoil := range map[string]func(e *backend.Entry){
		"slot":             func(e *backend.Entry) { e.Slot = 4 },
		"block":            func(e *backend.Entry) { e.Blocks = []int32{16} },
		"negative block":   func(e *backend.Entry) { e.Blocks = []int32{-1} },
		"too few blocks":   func(e *backend.Entry) { e.KVLen = 16 },
		"context":          func(e *backend.Entry) { e.KVLen, e.Blocks = 64, make([]int32, 9) },
		"token":            func(e *backend.Entry) { e.Tokens = []int32{100} },
		"no tokens":        func(e *backend.Entry) { e.Tokens = []int32{} },
		"wanted position":  func(e *backend.Entry) { e.Logits = []int{1} },
		"falling position": func(e *backend.Entry) { e.Tokens, e.Logits = []int32{1, 2}, []int{1, 0} },
	} {
		e := good
		spoil(&e)
		if step := d.submit(&backend.Batch{Entries: []backend.Entry{e}}); step.Err == nil {
			t.Errorf("%s: accepted %+v", name, e)
		}
	}
	if step := d.submit(&backend.Batch{Assign: []backend.Assign{{Slot: -1}}}); step.Err == nil {
		t.Error("a negative slot was assigned")
	}
	for name, c := range map[string]*backend.Copy{
		"block":  d.CopyOut([]backend.Region{{Block: 16, LayerTo: 1, HeadTo: 1, TokenTo: 1}}, make([]byte, 16)),
		"layer":  d.CopyIn([]backend.Region{{LayerTo: 5, HeadTo: 1, TokenTo: 1}}, make([]byte, 80)),
		"empty":  d.CopyIn([]backend.Region{{LayerTo: 1, HeadTo: 1}}, nil),
		"buffer": d.CopyOut([]backend.Region{{LayerTo: 1, HeadTo: 1, TokenTo: 1}}, make([]byte, 15)),
	} {
		<-c.Done()
		if c.Err == nil {
			t.Errorf("copy with a bad %s was accepted", name)
		}
	}
	_ = d.Close()
	if step := d.submit(&backend.Batch{}); step.Err == nil {
		t.Error("a closed device took a step")
	}
}

func TestBadConfigIsRefused(t *testing.T) {
	for name, cfg := range map[string]Config{
		"no clock":       {},
		"odd head size":  {HeadSize: 3, Now: clock()},
		"negative slots": {MaxSlots: -1, Now: clock()},
		"stage":          {Stage: backend.Stage{First: 2, End: 9}, Now: clock()},
	} {
		if d, err := New(cfg); err == nil {
			t.Errorf("%s: accepted", name)
			_ = d.Close()
		}
	}
}
