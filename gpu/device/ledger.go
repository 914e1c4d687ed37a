package device

import (
	"fmt"
	"os"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/nvml"
	"meridian.internal/gpu/stats"
	"meridian.internal/shared/rows"
)

// keepStatistics connects the engine to the makers of rows and of the iteration log that the sink asks for.
func keepStatistics(cfg *engine.Config, s rows.Sink, info backend.Info) error {
	cfg.Energy = s.Energy
	var each []func(*engine.Iteration)
	if s.Interval > 0 {
		c, err := stats.New(stats.Options{
			Interval: s.Interval, KVInterval: s.KVInterval, MaxActive: cfg.MaxBatchSize, Put: s.Put, Memory: s.Memory,
			BlockBytes: blockBytes(info),
			Violated:   func(err error) { cfg.Logger.Error("kv blocks are not conserved; rows count it", "error", err) },
		})
		if err != nil {
			return err
		}
		each = append(each, c.Iterated)
		cfg.OnIdle, cfg.RequestStates = c.Idled, s.RequestStats
	}
	if s.Log != nil {
		each = append(each, (&stats.Log{Max: cfg.MaxBatchSize, Write: s.Log}).Iterated)
	}
	switch len(each) {
	case 0:
	case 1:
		cfg.OnIteration = each[0]
	default:
		cfg.OnIteration = func(it *engine.Iteration) {
			for _, f := range each {
				f(it)
			}
		}
	}
	return nil
}

// blockBytes is the size of a KV block of each group of layers.
func blockBytes(info backend.Info) []int {
	bytes := []int{info.BlockBytes(0)}
	for i := range info.Windows {
		bytes = append(bytes, info.BlockBytes(i+1))
	}
	return bytes
}

// groups are the groups of layers that have bytes, as rows tell of them; nil if there is only one, whose layers see everything.
func groups(info backend.Info) []rows.Group {
	if len(info.Windows) == 0 {
		return nil
	}
	var g []rows.Group
	if n := info.BlockBytes(0); n > 0 {
		g = append(g, rows.Group{Tokens: int64(info.ContextLen), BlockBytes: int64(n)})
	}
	for i, w := range info.Windows {
		g = append(g, rows.Group{Tokens: int64(w.Tokens), Window: rows.Some(w.Tokens), BlockBytes: int64(info.BlockBytes(i + 1))})
	}
	return g
}

// Static is what the rows of the engine have in common.
func (d *Device) Static(node, clockID string) rows.Static {
	cfg := d.Engine.Config()
	s := rows.Static{
		Node: node, ClockID: clockID, Mode: "non_overlap", MaxBatchSize: int64(cfg.MaxBatchSize), MaxNumTokens: int64(cfg.MaxNumTokens),
		TokensPerBlock: int64(d.Info.TokensPerBlock), BlockBytes: int64(d.Info.BlockBytes(0)),
		Window: int64(d.Info.ContextLen), Tier: "host", Groups: groups(d.Info),
	}
	if len(s.Groups) > 0 {
		s.Window, s.BlockBytes = s.Groups[0].Tokens, s.Groups[0].BlockBytes
	}
	if cfg.Overlap {
		s.Mode = "overlap"
	}
	if d.Info.Device == "cuda" {
		s.Tier = "gpu"
	}
	if cfg.HostKVBytes > 0 {
		s.HostTier = "host"
	}
	if cfg.DiskKVDir != "" {
		s.DiskTier = "disk"
	}
	return s
}

// WatchGPU opens what reads the card that the device computes on. An error is for good.
func (d *Device) WatchGPU() (read func() ([]rows.GPU, error), err error) {
	if d.Info.Device != "cuda" {
		return nil, fmt.Errorf("--device %s: %w: it is no GPU", d.Info.Device, nvml.ErrUnavailable)
	}
	return nvml.Open(d.gpu, os.Getenv("CUDA_VISIBLE_DEVICES"))
}
