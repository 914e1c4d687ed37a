package device

import (
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"runtime"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/cpu"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/kvwire"
	"meridian.internal/gpu/model"
	"meridian.internal/gpu/pipeline"
	"meridian.internal/gpu/profile"
	"meridian.internal/gpu/ranks"
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
	// CardClock is what is known of the card's clock; nil where stamps are the process's own.
	CardClock func() (clock.Estimate, bool)

	backends []backend.Backend // of the ranks
	gpu      int               // the card of --device cuda
}

// Sharer is the back end if it can share KV with other processes of the host, nil otherwise.
func (d *Device) Sharer() backend.Sharer {
	if len(d.backends) > 1 {
		return nil // what is shared is one block memory
	}
	s, _ := d.backends[0].(backend.Sharer)
	return s
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

// Open loads the model and starts the back end.
func Open(o Options, now func() int64, log *slog.Logger) (_ *Device, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	d := &Device{Name: embeddedName, gpu: o.GPU}
	if o.Model != "" {
		d.Name = filepath.Base(o.Model)
	}
	if d.Model, err = model.Load(o.Model); err != nil {
		return nil, fmt.Errorf("--model %q: %w", o.Model, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.Close())
		}
	}()
	if d.Tokenizer, err = token.Parse(d.Model.TokenizerJSON); err != nil {
		return nil, fmt.Errorf("--model %q: tokenizer.json: %w", o.Model, err)
	}
	room, err := o.room(&d.Model.Config)
	if err != nil {
		return nil, err
	}
	for range o.Ranks {
		var b backend.Backend
		if b, d.CardClock, err = openBackend(o, d.Model, room, now); err != nil {
			return nil, fmt.Errorf("--device %s: %w", o.Device, err)
		}
		d.backends = append(d.backends, b)
	}
	d.Info = d.backends[0].Info()
	cfg := engine.Config{
		MaxBatchSize: o.MaxBatchSize, MaxNumTokens: o.MaxNumTokens, MaxWaiting: o.MaxWaiting, Overlap: o.Overlap,
		PrefixReuse: o.PrefixReuse, HostKVBytes: int64(o.KVHostMemory), DiskKVDir: o.KVDisk.Dir, DiskKVBytes: int64(o.KVDisk.Size), EOS: d.Model.Config.EOS, Now: now, Logger: log, MaxStepRecords: o.Sink.MaxStepRecords,
		ExportDeadline: holdLimit, ReserveDeadline: holdLimit, KVEvents: o.KVEvents, Epoch: o.KVEpoch,
		Profile: &profile.Options{Name: o.Sink.Node, Dir: o.ProfileDir, Windows: o.ProfileStartStop},
	}
	d.Engine, err = ranks.New(ranks.Options{Engine: cfg, Backends: d.backends, Sink: o.Sink, Deadline: o.RankDeadline})
	if err != nil {
		return nil, err
	}
	return d, nil
}

// openBackend opens the device of a rank: one, or a pipeline of one for each stage.
func openBackend(o Options, m *model.Model, room room, now func() int64) (backend.Backend, func() (clock.Estimate, bool), error) {
	if o.Device == "cuda" {
		return openCUDA(o, m, room.blocks, now)
	}
	if o.PP == 1 {
		b, err := openStage(o, m, room, now, backend.Stage{End: m.Config.Layers})
		return b, nil, err
	}
	if o.PP > m.Config.Layers {
		return nil, nil, fmt.Errorf("--pp %d: the model has %d layers", o.PP, m.Config.Layers)
	}
	var stages []backend.Backend
	fail := func(err error) (backend.Backend, func() (clock.Estimate, bool), error) {
		for _, b := range stages {
			err = errors.Join(err, b.Close())
		}
		return nil, nil, fmt.Errorf("--pp %d: %w", o.PP, err)
	}
	for i := range o.PP {
		b, err := openStage(o, m, room, now, backend.Stage{First: m.Config.Layers * i / o.PP, End: m.Config.Layers * (i + 1) / o.PP})
		if err != nil {
			return fail(err)
		}
		stages = append(stages, b)
	}
	p, err := pipeline.New(stages...)
	if err != nil {
		return fail(err)
	}
	return p, nil, nil
}

// openStage opens a device that owns some of the layers. Simulated, it takes its part of the time.
func openStage(o Options, m *model.Model, room room, now func() int64, st backend.Stage) (backend.Backend, error) {
	if o.Device == "sim" {
		c, part := o.Sim, float64(st.End-st.First)/float64(m.Config.Layers)
		return sim.New(sim.Config{
			ModelHash: "sim-" + m.Hash, Layers: m.Config.Layers, Stage: st, KVHeads: m.Config.KVHeads, HeadSize: m.Config.HeadSize,
			Vocab: m.Config.Vocab, ContextLen: m.Config.ContextLen, TokensPerBlock: o.TokensPerBlock, KVBlocks: room.blocks,
			Windows: m.Config.Windows, WindowBlocks: room.windowBlocks, MaxSlots: o.MaxBatchSize, Shallow: c.Shallow, Now: now,
			Cost: sim.Cost{
				Step: part * float64(c.Step), PrefillToken: part * float64(c.PrefillToken), Decode: part * float64(c.Decode),
				KVToken: part * float64(c.KVToken), CopyByte: c.CopyByte,
			},
		})
	}
	return cpu.New(m, cpu.Options{
		Stage: st, TokensPerBlock: o.TokensPerBlock, KVBlocks: room.blocks, WindowBlocks: room.windowBlocks, MaxSlots: o.MaxBatchSize,
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

// Close frees the device. The engine must have ended.
func (d *Device) Close() error {
	var errs []error
	for _, b := range d.backends {
		errs = append(errs, b.Close())
	}
	if d.Model != nil {
		errs = append(errs, d.Model.Close())
	}
	return errors.Join(errs...)
}
