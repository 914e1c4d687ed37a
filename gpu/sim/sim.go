// Package sim owns the back end that has a device's behaviour without a device's arithmetic: an asynchronous timeline of
// its own, a cost model in nanoseconds, and texts that are a pure function of the tokens so far. A token's KV holds words
// that depend on everything before it, and each forward reads the KV of all earlier tokens, so KV that was lost,
// swapped, duplicated or installed at the wrong place changes the text, and tests see it. It does not know requests,
// scheduling or networks.
package sim

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/gpu/backend"
)

// Cost is the model of time. A step takes
//
//	Step + PrefillToken*(query tokens of entries with more than one) + Decode*(entries with one) + KVToken*(KV tokens read)
//
// and a copy takes CopyByte for each byte. All in nanoseconds; zero costs nothing.
type Cost struct {
	Step, PrefillToken, Decode, KVToken, CopyByte float64
}

// Config describes the simulated device. Fields that are zero get the value in parentheses.
type Config struct {
	ModelHash      string        // ("sim"); equal hashes give equal texts
	Layers         int           // of the whole model (4)
	Stage          backend.Stage // (all layers)
	KVHeads        int           // (2)
	HeadSize       int           // even (2); a token's KV is Layers*2*KVHeads*HeadSize float32
	Vocab          int           // (32000)
	ContextLen     int           // (8192)
	TokensPerBlock int           // (32)
	KVBlocks       int           // (1024)
	Windows        []int         // (layers) tokens that a query sees, itself included; 0: all. (nil: all layers see all)
	WindowBlocks   int           // of the layers of one window (KVBlocks)
	MaxSlots       int           // (256)
	Cost           Cost
	// Shallow reads the KV of the previous token only: cheaper with long contexts, and damage goes mostly unseen.
	Shallow  bool
	Now      func() int64           // steady clock in ns, for stamps and the timeline; required
	Fail     func(iter int64) error // fails a step, for tests of what a fault does; may be nil
	FailCopy func(n int64) error    // likewise the n-th copy of KV, out or in
	Sleep    func(time.Duration)    // (time.Sleep)
	// Exact waits for timers of the kernel instead of Sleep, where there are some: time.Sleep of a process that has nothing else
	// to do ends up to 1 ms late. Not for synctest, whose time such a timer does not know.
	Exact bool
}

func (c *Config) setDefaults() {
	for _, d := range []struct {
		field *int
		value int
	}{
		{&c.Layers, 4}, {&c.KVHeads, 2}, {&c.HeadSize, 2}, {&c.Vocab, 32000}, {&c.ContextLen, 8192},
		{&c.TokensPerBlock, 32}, {&c.KVBlocks, 1024}, {&c.MaxSlots, 256},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.WindowBlocks == 0 {
		c.WindowBlocks = c.KVBlocks
	}
	if c.Stage == (backend.Stage{}) {
		c.Stage = backend.Stage{End: c.Layers}
	}
	if c.ModelHash == "" {
		c.ModelHash = "sim"
	}
	if c.Sleep == nil {
		c.Sleep = time.Sleep
	}
}

func (c *Config) validate() error {
	for _, f := range []struct {
		name  string
		value int
	}{
		{"Layers", c.Layers}, {"KVHeads", c.KVHeads}, {"HeadSize", c.HeadSize}, {"Vocab", c.Vocab}, {"ContextLen", c.ContextLen},
		{"TokensPerBlock", c.TokensPerBlock}, {"KVBlocks", c.KVBlocks}, {"WindowBlocks", c.WindowBlocks}, {"MaxSlots", c.MaxSlots},
	} {
		if f.value < 1 {
			return fmt.Errorf("sim: %s is %d, must be at least 1", f.name, f.value)
		}
	}
	switch {
	case c.HeadSize%2 != 0:
		return fmt.Errorf("sim: HeadSize is %d, must be even", c.HeadSize)
	case c.Stage.First < 0 || c.Stage.First >= c.Stage.End || c.Stage.End > c.Layers:
		return fmt.Errorf("sim: stage [%d, %d) is not a part of %d layers", c.Stage.First, c.Stage.End, c.Layers)
	case c.Windows != nil && len(c.Windows) != c.Layers:
		return fmt.Errorf("sim: Windows has %d entries, must have one for each of %d layers", len(c.Windows), c.Layers)
	case c.Now == nil:
		return fmt.Errorf("sim: no clock: Now is nil")
	}
	return nil
}

// hidden is the size of a hidden state: one 64-bit word, 16 bits an element, which float32 holds exactly.
const hidden = 4

// Device is the back end. Three goroutines work for it until Close: one owns the slots and runs the steps, two copy out
// and in. Each sleeps by a timer of its own.
type Device struct {
	backend.Inbox
	cfg    Config
	memory memory
	wg     sync.WaitGroup
	copies atomic.Int64 // begun
	timers []*timer     // none unless Exact
}

// New starts a device.
func New(cfg Config) (*Device, error) {
	cfg.setDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	d := &Device{Inbox: backend.NewInbox(), cfg: cfg}
	var sleeps [3]func(time.Duration)
	for i := range sleeps {
		var err error
		if sleeps[i], err = d.sleep(); err != nil {
			return nil, errors.Join(fmt.Errorf("sim: %w", err), d.closeTimers())
		}
	}
	d.memory = newMemory(d.Info())
	d.wg.Go(func() { newRunner(d, sleeps[0]).run() })
	d.wg.Go(func() { d.copyAll(d.Out, sleeps[1], d.memory.read) })
	d.wg.Go(func() { d.copyAll(d.In, sleeps[2], d.memory.write) })
	return d, nil
}

// sleep is how one goroutine of the device waits.
func (d *Device) sleep() (func(time.Duration), error) {
	if !d.cfg.Exact {
		return d.cfg.Sleep, nil
	}
	t, err := newTimer()
	if errors.Is(err, errors.ErrUnsupported) {
		return d.cfg.Sleep, nil
	}
	if err != nil {
		return nil, err
	}
	d.timers = append(d.timers, t)
	return t.sleep, nil
}

func (d *Device) closeTimers() error {
	var errs []error
	for _, t := range d.timers {
		errs = append(errs, t.close())
	}
	return errors.Join(errs...)
}

// Submit implements backend.Backend.
func (d *Device) Submit(b *backend.Batch) *backend.Step { return d.SubmitAt(b, d.cfg.Now()) }

// Info describes the device.
func (d *Device) Info() backend.Info {
	c := &d.cfg
	return backend.Info{
		Device: "sim", ModelHash: c.ModelHash, Vocab: c.Vocab, ContextLen: c.ContextLen,
		Layers: c.Layers, Stage: c.Stage, Hidden: hidden, KVHeads: c.KVHeads, HeadSize: c.HeadSize, KVType: "f32",
		RoPE: "none", TokensPerBlock: c.TokensPerBlock, KVBlocks: c.KVBlocks, MaxSlots: c.MaxSlots,
		Windows:  backend.WindowsOf(c.Windows, c.Stage, c.ContextLen, c.WindowBlocks),
		Numerics: "sim-1", DeviceClock: "mono",
	}
}

// copyAll makes the copies of one direction.
func (d *Device) copyAll(q *backend.Queue[backend.CopyJob], sleep func(time.Duration), move func(backend.Region, []byte) []byte) {
	for j, ok := q.Pop(); ok; j, ok = q.Pop() {
		j.Run(d.cfg.Now, func(regions []backend.Region, data []byte) error {
			if err := d.memory.check(regions, len(data)); err != nil {
				return err
			}
			if n := d.copies.Add(1); d.cfg.FailCopy != nil {
				if err := d.cfg.FailCopy(n); err != nil {
					return err
				}
			}
			if cost := time.Duration(d.cfg.Cost.CopyByte * float64(len(data))); cost > 0 {
				sleep(cost)
			}
			for _, r := range regions {
				data = move(r, data)
			}
			return nil
		})
	}
}

// Close runs what is queued, then ends the device's goroutines.
func (d *Device) Close() error {
	d.End()
	d.wg.Wait()
	return d.closeTimers()
}
