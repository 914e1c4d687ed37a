package device

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/cpu"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/kvwire"
	"meridian.internal/gpu/model"
	"meridian.internal/gpu/pipeline"
	"meridian.internal/gpu/profile"
	"meridian.internal/gpu/ranks"
	"meridian.internal/gpu/remote"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/token"
)

// Device is an open model, back end and engine. The engine is to be run, and to have ended before Close.
type Device struct {
	Name      string // of the model, as clients name it
	Model     *model.Model
	Tokenizer *token.Tokenizer
	Engine    *ranks.Group
	Info      backend.Info

	backends   []backend.Backend // of the ranks of this process
	remotes    []*remote.Engine  // the other ranks
	clockID    clock.ID          // of this process
	cardClocks map[int]cardClock // by card; empty where stamps are the process's own
}

// cardClock is what is known of a card's clock; false: nothing.
type cardClock func() (clock.Estimate, bool)

// CardClocks is what is known of the clocks of the cards, each to the clock of the process that stamps with it: this one, or a rank.
func (d *Device) CardClocks() []clock.Estimate {
	var out []clock.Estimate
	for _, card := range slices.Sorted(maps.Keys(d.cardClocks)) {
		if e, ok := d.cardClocks[card](); ok {
			e.Reference = d.clockID
			out = append(out, e)
		}
	}
	for _, e := range d.remotes {
		out = append(out, e.CardClocks()...)
	}
	return out
}

// Sharer is the back end if it can share KV with other processes of the host, nil otherwise.
func (d *Device) Sharer() backend.Sharer {
	if d.Engine.Ranks() > 1 {
		return nil // what is shared is one block memory
	}
	s, _ := d.backends[0].(backend.Sharer)
	return s
}

// Buffers is memory that the device copies KV from and to without a detour, nil if it has none.
func (d *Device) Buffers() kvwire.Buffers {
	b, _ := d.backends[0].(kvwire.Buffers)
	return b
}

// Lend leases what the engine has cached of the beginning of a prompt, for a peer.
func (d *Device) Lend(tokens []int32) (kvwire.Export, int) {
	if x := d.Engine.Lend(tokens); x != nil {
		return x, x.Tokens()
	}
	return nil, 0
}

// embeddedName is the name of the model that is part of the program.
const embeddedName = "meridian-tiny"

// defaultKVMemory is a modest amount that 64 requests of a few hundred tokens of a small model fit into.
const defaultKVMemory = 128 << 20

// holdLimit is the last resort for KV that is held for another node. Leases, lost peers and the requests' own deadlines
// end earlier; under overload a claimed hand-over may rightly wait for minutes until there is a place to decode.
const holdLimit = 10 * time.Minute

// Open loads the model and starts the back ends, or the processes that have them, which it waits for until ctx ends.
func Open(ctx context.Context, o Options, now func() int64, log *slog.Logger) (_ *Device, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	d := &Device{}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	begun, err := o.start() // they load while rank 0 does
	if err != nil {
		return nil, err
	}
	cfg, err := d.load(&o, 0, o.Ranks-len(begun), now, log)
	if err == nil {
		if d.Tokenizer, err = token.Parse(d.Model.TokenizerJSON); err != nil {
			err = fmt.Errorf("--model %q: tokenizer.json: %w", o.Model, err)
		}
	}
	if err != nil {
		begun.close()
		return nil, err
	}
	if d.remotes, err = begun.open(ctx, cmp.Or(o.RankDeadline, ranks.DefaultDeadline), now, log); err != nil {
		return nil, err
	}
	d.Info = d.backends[0].Info()
	d.Engine, err = ranks.New(ranks.Options{Engine: cfg, Backends: d.backends, Remotes: d.remotes, Sink: o.Sink, Cards: o.rankCards(), Deadline: o.RankDeadline})
	return d, err
}

// load loads the model, and opens the back ends of some ranks. The configuration is that of an engine on any of them.
func (d *Device) load(o *Options, rank, n int, now func() int64, log *slog.Logger) (cfg engine.Config, err error) {
	d.Name, d.clockID, d.cardClocks = embeddedName, o.ClockID, map[int]cardClock{}
	if o.Model != "" {
		d.Name = filepath.Base(o.Model)
	}
	if d.Model, err = model.Load(o.Model); err != nil {
		return cfg, fmt.Errorf("--model %q: %w", o.Model, err)
	}
	room, err := o.room(&d.Model.Config)
	if err == nil {
		err = o.checkHost(room, machineMemory())
	}
	if err != nil {
		return cfg, err
	}
	for i := range n {
		b, err := d.openRank(*o, rank+i, room, now)
		if err != nil {
			return cfg, fmt.Errorf("--device %s: %w", o.Device, err)
		}
		d.backends = append(d.backends, b)
	}
	return engine.Config{
		MaxBatchSize: o.MaxBatchSize, MaxNumTokens: o.MaxNumTokens, MaxWaiting: o.MaxWaiting, Overlap: o.Overlap,
		PrefixReuse: o.PrefixReuse, HostKVBytes: int64(o.KVHostMemory), DiskKVDir: o.KVDisk.Dir, DiskKVBytes: int64(o.KVDisk.Size), EOS: d.Model.Config.EOS, Now: now, Logger: log, MaxStepRecords: o.Sink.MaxStepRecords,
		ExportDeadline: holdLimit, ReserveDeadline: holdLimit, StepDeadline: o.StepDeadline, KVEvents: o.KVEvents, Epoch: o.KVEpoch,
		Profile: &profile.Options{Name: o.Sink.Node, Dir: o.ProfileDir, Windows: o.ProfileStartStop, ClockID: string(o.ClockID)},
	}, nil
}

// openRank opens the device of a rank: one, or a pipeline of one for each stage.
func (d *Device) openRank(o Options, rank int, room room, now func() int64) (backend.Backend, error) {
	layers := d.Model.Config.Layers
	if o.PP > layers {
		return nil, fmt.Errorf("--pp %d: the model has %d layers", o.PP, layers)
	}
	parts := o.parts(rank, layers)
	if len(parts) == 1 {
		return d.openPart(o, parts[0], room, now)
	}
	var stages []backend.Backend
	fail := func(err error) (backend.Backend, error) {
		for _, b := range stages {
			err = errors.Join(err, b.Close())
		}
		return nil, fmt.Errorf("--pp %d: %w", o.PP, err)
	}
	for _, p := range parts {
		b, err := d.openPart(o, p, room, now)
		if err != nil {
			return fail(err)
		}
		stages = append(stages, b)
	}
	p, err := pipeline.New(stages...)
	if err != nil {
		return fail(err)
	}
	return p, nil
}

// openPart opens the device of a stage. Simulated, it takes its part of the time.
func (d *Device) openPart(o Options, p part, room room, now func() int64) (backend.Backend, error) {
	m, st := d.Model, p.stage
	switch o.Device {
	case "cuda":
		b, clock, err := openCUDA(o, m, p, room, now)
		if err == nil {
			d.cardClocks[p.card] = clock
		}
		return b, err
	case "sim":
		c, part := o.Sim, float64(st.End-st.First)/float64(m.Config.Layers)
		return sim.New(sim.Config{
			ModelHash: "sim-" + m.Hash, Layers: m.Config.Layers, Stage: st, KVHeads: m.Config.KVHeads, HeadSize: m.Config.HeadSize,
			Vocab: m.Config.Vocab, ContextLen: m.Config.ContextLen, TokensPerBlock: o.TokensPerBlock, KVBlocks: room.blocks,
			Windows: m.Config.Windows, WindowBlocks: room.windows(room.blocks), MaxSlots: o.MaxBatchSize, Shallow: c.Shallow, Now: now, Exact: true,
			Cost: sim.Cost{
				Step: part * float64(c.Step), PrefillToken: part * float64(c.PrefillToken), Decode: part * float64(c.Decode),
				KVToken: part * float64(c.KVToken), CopyByte: c.CopyByte,
			},
			Fail: hangAt(c.FaultHangAt), FailCopy: hangAt(c.FaultHangCopyAt),
		})
	}
	return cpu.New(m, cpu.Options{
		Stage: st, TokensPerBlock: o.TokensPerBlock, KVBlocks: room.blocks, WindowBlocks: room.windows(room.blocks), MaxSlots: o.MaxBatchSize,
		Threads: o.threads(), Now: now,
	})
}

// threads is the number of goroutines of each stage of each rank on the cpu device.
func (o *Options) threads() int {
	if o.Threads > 0 {
		return o.Threads
	}
	return max(1, runtime.GOMAXPROCS(0)/(o.Ranks*o.PP))
}

// hangAt is the fault that --sim-fault-hang-at asks for, or --sim-fault-hang-copy-at; nil: none.
func hangAt(at int64) func(n int64) error {
	if at == 0 {
		return nil
	}
	return func(n int64) error {
		if n == at {
			select {}
		}
		return nil
	}
}

// closeWait is how long a device may take to end what it still runs.
const closeWait = 5 * time.Second

// Close frees the device. The engine must have ended, or never run. A device that does not end what it runs stays open, and the
// model with it; then there is an error.
func (d *Device) Close() error {
	var errs []error
	for _, e := range d.remotes {
		errs = append(errs, e.Close())
	}
	closed := make(chan error, 1)
	go func() {
		var errs []error
		for _, b := range d.backends {
			errs = append(errs, b.Close())
		}
		closed <- errors.Join(errs...)
	}()
	limit := time.NewTimer(closeWait)
	defer limit.Stop()
	select {
	case err := <-closed:
		errs = append(errs, err)
	case <-limit.C:
		return errors.Join(append(errs, fmt.Errorf("device: it still runs %v after the end of its engine", closeWait))...)
	}
	if d.Model != nil {
		errs = append(errs, d.Model.Close())
	}
	return errors.Join(errs...)
}
