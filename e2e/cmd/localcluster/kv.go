package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"os"
	"time"

	"meridian.internal/e2e/load"
)

type reuse struct {
	layout
	Requests      int  `help:"Requests with shared prefixes." default:"1000"`
	Prefixes      int  `help:"Different prefixes." default:"20"`
	PrefixTokens  int  `help:"Tokens of a prefix." default:"1024"`
	TailTokens    int  `help:"Tokens of a prompt after its prefix." default:"64"`
	Without       int  `help:"Requests that are sent without reuse, for the time to the first token." default:"100"`
	Conversations int  `help:"Chats." default:"100"`
	Turns         int  `help:"Turns of a chat." default:"8"`
	Concurrency   int  `help:"Requests at a time." default:"4"`
	JSON          bool `help:"Print the result as one JSON object on the last line." name:"json"`
}

// reused is what the load saw, and what is wanted of it.
type reused struct {
	Name    string       `json:"name"`
	Router  string       `json:"policy"`
	Share   float64      `json:"reused_share"` // of the tokens that were sent before
	Summary load.Summary `json:"summary"`
}

// Run measures how much of what was sent before is not computed again: prompts with shared prefixes, with and without reuse of
// KV; chats, placed by what nodes hold and in turn.
func (v *reuse) Run(ctx context.Context, log *slog.Logger) error {
	prefix := func(n int) func(context.Context, string, string) (load.Summary, error) {
		return func(ctx context.Context, url, model string) (load.Summary, error) {
			p := load.Plan{
				URL: url, Model: model, Requests: n, Concurrency: v.Concurrency, Prefix: v.PrefixTokens, Prefixes: v.Prefixes, Vocab: vocab,
				Stream: true, IgnoreEOS: true, Seed: 1, Timeout: turnTimeout,
			}
			if err := errors.Join(p.Prompt.UnmarshalText(fmt.Append(nil, v.PrefixTokens+v.TailTokens)), p.Output.UnmarshalText([]byte("4"))); err != nil {
				return load.Summary{}, err
			}
			return load.Run(ctx, p, nil)
		}
	}
	chats := func(ctx context.Context, url, model string) (load.Summary, error) {
		p := load.Chats{URL: url, Model: model, Conversations: v.Conversations, Turns: v.Turns, Concurrency: v.Concurrency, Words: 24, Seed: 1, Timeout: turnTimeout}
		if err := p.Output.UnmarshalText([]byte("32")); err != nil {
			return load.Summary{}, err
		}
		return load.Chat(ctx, p)
	}
	var all []reused
	for _, r := range []struct {
		name, policy string
		nodeArgs     []string
		load         func(ctx context.Context, url, model string) (load.Summary, error)
	}{
		{"shared prefixes", "kv_aware", nil, prefix(v.Requests)},
		{"shared prefixes, no reuse", "kv_aware", []string{"--no-prefix-reuse"}, prefix(v.Without)},
		{"chats", "kv_aware", nil, chats},
		{"chats", "round_robin", nil, chats},
	} {
		s, err := v.measure(ctx, log, r.policy, r.nodeArgs, r.load)
		if err != nil {
			return fmt.Errorf("%s, %s: %w", r.name, r.policy, err)
		}
		x := reused{Name: r.name, Router: r.policy, Summary: s}
		if s.SharedTokens > 0 {
			x.Share = float64(s.ReusedTokens) / float64(s.SharedTokens)
		}
		all = append(all, x)
	}
	return v.print(all)
}

const (
	turnTimeout = 5 * time.Minute
	vocab       = 2000 // of the embedded model's ids that are words
)

// measure runs a load on a cluster of its own, so that nothing is cached at its start.
func (v *reuse) measure(ctx context.Context, log *slog.Logger, policy string, nodeArgs []string, send func(ctx context.Context, url, model string) (load.Summary, error)) (s load.Summary, err error) {
	cfg, err := v.config(log)
	if err != nil {
		return s, err
	}
	if v.Dir == "" {
		defer os.RemoveAll(cfg.Dir)
	}
	cfg.NodeArgs, cfg.RouterArgs = append(cfg.NodeArgs, nodeArgs...), append(cfg.RouterArgs, "--policy="+policy)
	c, err := start(ctx, cfg)
	if err != nil {
		return s, err
	}
	defer func() { err = errors.Join(err, c.Stop()) }()
	if s, err = send(ctx, c.URL(), modelName(ctx, c)); err == nil && s.OK != s.Requests {
		err = fmt.Errorf("%d of %d requests failed: %v", s.Requests-s.OK, s.Requests, s.Errors)
	}
	if err == nil {
		err = ctx.Err() // what was interrupted is no figure
	}
	return s, err
}

func (v *reuse) print(all []reused) error {
	fmt.Printf("%-28s %-12s %9s %9s %12s %12s\n", "load", "policy", "requests", "reused", "ttft p50 ms", "ttft p99 ms")
	for _, x := range all {
		fmt.Printf("%-28s %-12s %9d %8.1f%% %12.1f %12.1f\n", x.Name, x.Router, x.Summary.Requests, 100*x.Share, ms(x.Summary.TTFT.P50), ms(x.Summary.TTFT.P99))
	}
	ratio := ms(all[0].Summary.TTFT.P50) / ms(all[1].Summary.TTFT.P50)
	fmt.Printf("shared prefixes: %.1f %% not computed again (goal 93), TTFT p50 %.1f %% of that without reuse (goal 25)\n", 100*all[0].Share, 100*ratio)
	fmt.Printf("chats: %.1f %% not computed again with kv_aware (goal 90), %.1f %% with round_robin\n", 100*all[2].Share, 100*all[3].Share)
	if !v.JSON {
		return nil
	}
	b, err := json.Marshal(all)
	if err != nil {
		return fmt.Errorf("write the result: %w", err)
	}
	fmt.Println(string(b))
	return nil
}

func ms(ns *int64) float64 {
	if ns == nil {
		return math.NaN()
	}
	return float64(*ns) / 1e6
}
