package worker

import (
	"context"
	"fmt"
	"log/slog"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/hardware"
	"meridian.internal/shared/ledger"
	"meridian.internal/shared/rows"
)

// LedgerFlags are the options of the engine's and the machine's accounting.
type LedgerFlags struct {
	IterStatsInterval int  `help:"A row of statistics of every Nth iteration; sums stay exact. 0: none." default:"1"`
	IterStatsMax      int  `help:"Rows of statistics that are kept for readers." default:"1000"`
	KVStatsInterval   int  `help:"KV statistics in the rows of every Nth iteration, a multiple of --iter-stats-interval. 0: in every row." default:"0" name:"kv-stats-interval"`
	IterReqStats      bool `help:"The state of every request in every row: large rows."`
	IterLog           bool `help:"A line in the log for every iteration."`
	IterPublish       bool `help:"Publish the rows on NATS as meridian.iter.<node>."`
	MetricsAllRanks   bool `help:"Ranks gather their rows in rounds of their own, once all have made them, not with the rounds of the iterations. The numbers are the same."`
	MaxStepRecords    int  `help:"Decode steps kept of a request whose steps are asked for; the rest is counted. 0: 8192." default:"8192"`
	ReturnPerfMetrics bool `help:"Keep the steps of every request, as if each asked with X-TRTLLM-return-metrics: 1."`
	VLLMMetrics       bool `help:"Export vLLM's metric names as well as our own." default:"true" negatable:"" name:"vllm-metrics"`
}

const maxIterStats = 10_000_000

func (f *LedgerFlags) validate() error {
	switch n := f.IterStatsInterval; {
	case n < 0:
		return fmt.Errorf("--iter-stats-interval %d: must be 0 or more", n)
	case f.IterStatsMax < 1 || f.IterStatsMax > maxIterStats:
		return fmt.Errorf("--iter-stats-max %d: must be 1 to %d", f.IterStatsMax, maxIterStats)
	case f.KVStatsInterval < 0 || f.KVStatsInterval > 0 && (n == 0 || f.KVStatsInterval%n != 0):
		return fmt.Errorf("--kv-stats-interval %d: must be a multiple of --iter-stats-interval, %d", f.KVStatsInterval, n)
	case f.MaxStepRecords < 0:
		return fmt.Errorf("--max-step-records %d: must be 0 or more", f.MaxStepRecords)
	}
	return nil
}

// openLedgers makes the ledgers. The engine's is completed by its Start, once the engine is known.
func (d *Daemon) openLedgers() error {
	f := &d.flags.LedgerFlags
	d.Hardware = hardware.New(hardware.Options{Logger: d.log})
	if err := d.Hardware.Register(d.Metrics); err != nil {
		return fmt.Errorf("register metrics of the hardware: %w", err)
	}
	d.Ledger = ledger.New(ledger.Options{Keep: f.IterStatsMax, VLLM: f.VLLMMetrics, Sink: f.sink(d.Name, d.Hardware, d.log), Registry: d.Metrics, Logger: d.log})
	return nil
}

// sink is what is asked of the engine of a node with this name.
func (f *LedgerFlags) sink(name string, h *hardware.Sampler, log *slog.Logger) rows.Sink {
	s := rows.Sink{
		Node: name, Interval: f.IterStatsInterval, KVInterval: f.KVStatsInterval, MaxStepRecords: f.MaxStepRecords, RequestStats: f.IterReqStats, AllRanks: f.MetricsAllRanks,
		Memory: h.Memory, Energy: h.Energy,
	}
	if f.IterLog {
		s.Log = func(line string) { log.LogAttrs(context.Background(), slog.LevelInfo, line) } //nolint:sloglint // the line is TensorRT-LLM's
	}
	return s
}

// ledgerWork is what runs beside the engine for the ledgers.
func (d *Daemon) ledgerWork() []func(context.Context) error {
	work := []func(context.Context) error{d.Hardware.Run}
	if d.flags.IterPublish && d.Bus != nil {
		subject := bus.IterSubject(d.Name)
		work = append(work, func(ctx context.Context) error {
			return d.Ledger.Publish(ctx, func(row []byte) error { return d.Bus.NATS().Publish(subject, row) })
		})
	}
	return work
}
