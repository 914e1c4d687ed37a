package device

import (
	"os"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/nvml"
	"meridian.internal/shared/rows"
)

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
	if cfg.Overlap || d.Info.Stages > 1 {
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

// WatchGPU opens what reads the cards that the node computes on; nil: it computes on none. An error is for good.
func (o *Options) WatchGPU() (read func() ([]rows.GPU, error), err error) {
	if o.Device != "cuda" {
		return nil, nil
	}
	return nvml.Open(o.cards(), os.Getenv("CUDA_VISIBLE_DEVICES"))
}
