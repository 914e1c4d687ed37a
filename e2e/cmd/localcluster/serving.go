package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/load"
)

type serving struct {
	layout
	Streams int           `help:"Streams that run at any time." default:"64"`
	Prompt  int           `help:"Tokens in of a stream." default:"1024"`
	Output  int           `help:"Tokens out of it." default:"256"`
	Warm    time.Duration `help:"Time before each measurement." default:"4s"`
	Time    time.Duration `help:"Time of each measurement." default:"16s"`
	Rounds  int           `help:"Runs of each mode, in turn." default:"2"`
	Least   float64       `help:"What the pair is to serve of that which one node alone does." default:"0.85"`
	Profile int           `help:"Steps of a profile window of the generation node, once all streams decode; 0: none." default:"0"`
	JSON    bool          `help:"Print the result as one JSON object on the last line." name:"json"`
}

// The modes that are compared. One node has what the two of a pair have together: the same device, or all of the card's part.
const (
	pair  = "pair"
	alone = "one node"
)

// served is what one run of a mode has seen.
type served struct {
	Mode    string       `json:"mode"`
	Round   int          `json:"round"`
	Summary load.Summary `json:"summary"`
}

// Run serves the same load by a context and a generation node, and by one node that does both, in turn. A missed goal is a figure,
// not an error.
func (v *serving) Run(ctx context.Context, log *slog.Logger) error {
	if v.Rounds < 1 || v.Streams < 1 || v.Output < 2 || v.Time <= 0 || v.Profile < 0 {
		return fmt.Errorf("--rounds %d --streams %d --output %d --time %v --profile %d: want at least 1, 1, 2, a time and 0", v.Rounds, v.Streams, v.Output, v.Time, v.Profile)
	}
	var all []served
	for round := range v.Rounds {
		modes := []string{pair, alone}
		if round%2 == 1 {
			slices.Reverse(modes)
		}
		for _, mode := range modes {
			s, err := v.measure(ctx, log, mode, round)
			if err != nil {
				return fmt.Errorf("%s, round %d: %w", mode, round+1, err)
			}
			fmt.Println(s)
			all = append(all, s)
		}
	}
	return v.print(all)
}

// cluster starts what a mode runs on.
func (v *serving) cluster(ctx context.Context, log *slog.Logger, mode string) (*cluster.Cluster, error) {
	cfg, err := v.config(log)
	if err != nil {
		return nil, err
	}
	if mode == alone {
		cfg.Ctx, cfg.Gen, cfg.Schedules = 0, 1, []string{"aggregated"}
		if v.Device == "cuda" {
			cfg.NodeArgs = append(cfg.NodeArgs, fmt.Sprintf("--gpu-memory-fraction=%.3f", cardShare)) // in place of a share of it
		}
	}
	cfg.NodeArgs = append(cfg.NodeArgs, fmt.Sprintf("--max-batch-size=%d", v.Streams))
	return start(ctx, cfg)
}

// measure runs one mode on a cluster of its own.
func (v *serving) measure(ctx context.Context, log *slog.Logger, mode string, round int) (s served, err error) {
	s = served{Mode: mode, Round: round + 1}
	c, err := v.cluster(ctx, log, mode)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, c.Stop()) }()
	p := load.Plan{
		URL: c.URL(), Model: modelName(ctx, c), Concurrency: v.Streams, Duration: v.Warm, Prompt: load.Constant(v.Prompt), Output: load.Constant(v.Output),
		Vocab: vocab, Stream: true, IgnoreEOS: true, Timeout: turnTimeout,
	}
	for i, t := range []time.Duration{v.Warm, v.Time} {
		if t == 0 {
			continue
		}
		p.Duration, p.Seed = t, uint64(2*round+i+1) // prompts that no cache knows
		if s.Summary, err = load.Run(ctx, p, os.Stderr); err == nil && s.Summary.OK != s.Summary.Requests {
			err = fmt.Errorf("%d of %d requests failed: %v", s.Summary.Requests-s.Summary.OK, s.Summary.Requests, s.Summary.Errors)
		}
		if err != nil {
			return s, err
		}
	}
	if mode == pair && round == 0 && v.Profile > 0 {
		err = v.profile(ctx, c, p)
	}
	return s, err
}

// String is the line that a person reads.
func (s served) String() string {
	m := &s.Summary
	return fmt.Sprintf("%-10s round %d: %8.1f requests/s %9.0f tokens/s   TTFT p50 %7.1f p99 %7.1f ms   ITL p50 %6.2f p99 %6.2f ms", s.Mode, s.Round, m.RequestsPerS,
		m.OutputPerS, ms(m.TTFT.P50), ms(m.TTFT.P99), ms(m.ITL.P50), ms(m.ITL.P99))
}

func (v *serving) print(all []served) error {
	rate := func(mode string) float64 {
		var rates []float64
		for _, s := range all {
			if s.Mode == mode {
				rates = append(rates, s.Summary.RequestsPerS)
			}
		}
		slices.Sort(rates)
		return (rates[(len(rates)-1)/2] + rates[len(rates)/2]) / 2
	}
	ratio := rate(pair) / rate(alone)
	verdict := "met"
	if !(ratio >= v.Least) {
		verdict = "missed"
	}
	fmt.Printf("serving %d streams of %d tokens in and %d out: %s %.1f requests/s, %s %.1f: %.1f %% (goal %.0f %%, %s)\n", v.Streams, v.Prompt, v.Output, pair, rate(pair),
		alone, rate(alone), 100*ratio, 100*v.Least, verdict)
	if !v.JSON {
		return nil
	}
	b, err := json.Marshal(map[string]any{"ratio": ratio, "runs": all})
	if err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	fmt.Println(string(b))
	return nil
}

// profileDir is where a run leaves its profile window.
func (v *serving) profileDir() (string, error) {
	if v.Dir == "" {
		return os.MkdirTemp("", "meridian-profile-")
	}
	return filepath.Abs(filepath.Join(v.Dir, "profile"))
}
