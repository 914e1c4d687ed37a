package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

type verify struct {
	layout
	Cases       int  `help:"Prompts to compare." default:"60"`
	Concurrency int  `help:"Cases that run at the same time, so that batches differ." default:"4"`
	PrefixReuse bool `help:"Let nodes reuse the KV of an earlier style; then less KV moves." negatable:"" default:"false"`
	JSON        bool `help:"Print the result as one JSON object on the last line." name:"json"`
}

// styles are the serving styles that are compared, the first one being what the others are compared with.
func styles() []string { return []string{"generation_first", "context_first", "aggregated"} }

// testCase is one prompt in one way of asking.
type testCase struct {
	Index     int    `json:"case"`
	Prompt    []int  `json:"-"`
	Tokens    int    `json:"prompt_tokens"`
	MaxTokens int    `json:"max_tokens"`
	Seeded    bool   `json:"seeded"` // sampled with a seed; otherwise greedy
	Streamed  bool   `json:"streamed"`
	Equal     bool   `json:"equal"`
	Runs      []*run `json:"runs"`
	reuse     bool   // nodes may hold the KV of an earlier style
}

// run is one case in one style.
type run struct {
	Style   string `json:"style"`
	Ctx     string `json:"ctx,omitempty"`
	CtxPID  int    `json:"ctx_pid,omitempty"`
	Gen     string `json:"gen,omitempty"`
	GenPID  int    `json:"gen_pid,omitempty"`
	KVBytes int64  `json:"kv_bytes"`
	Error   string `json:"error,omitempty"`
	text    string
	end     string // finish reason and count of tokens
}

const (
	maxPrompt   = 1800
	caseTimeout = 3 * time.Minute
	// chunkTokens makes prompts of many chunks out of prompts that the embedded model can take.
	chunkTokens = 256
)

// Run compares; the error says how many cases differ.
func (v *verify) Run(ctx context.Context, log *slog.Logger) error {
	if v.Cases < 1 || v.Concurrency < 1 {
		return fmt.Errorf("--cases %d --concurrency %d: want at least 1", v.Cases, v.Concurrency)
	}
	cfg, err := v.config(log)
	if err != nil {
		return err
	}
	cfg.Schedules = styles()
	cfg.NodeArgs = append(cfg.NodeArgs, fmt.Sprintf("--max-num-tokens=%d", chunkTokens))
	if v.Device == "cuda" {
		cfg.NodeArgs = append(cfg.NodeArgs, "--deterministic") // the styles batch differently
	}
	if !v.PrefixReuse {
		cfg.NodeArgs = append(cfg.NodeArgs, "--no-prefix-reuse")
	}
	c, err := start(ctx, cfg)
	if err != nil {
		return err
	}
	cases, err := v.play(ctx, c)
	return errors.Join(err, c.Stop(), v.print(cases))
}

func (v *verify) play(ctx context.Context, c *cluster.Cluster) ([]*testCase, error) {
	model := modelName(ctx, c)
	clients := make([]*client.Client, len(c.Routers))
	for i, r := range c.Routers {
		clients[i] = client.New(r.URL, v.Concurrency)
		defer clients[i].Close()
	}
	cases := makeCases(v.Cases)
	var mu sync.Mutex // guards stdout
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(v.Concurrency)
	for _, tc := range cases {
		tc.reuse = v.PrefixReuse
		g.Go(func() error {
			for i, style := range styles() {
				r := &run{Style: style}
				tc.Runs = append(tc.Runs, r)
				if err := tc.send(ctx, clients[i], model, r); err != nil {
					r.Error = err.Error()
				}
				r.name(c)
			}
			tc.compare()
			mu.Lock()
			defer mu.Unlock()
			fmt.Println(tc)
			return ctx.Err()
		})
	}
	return cases, g.Wait()
}

// makeCases spreads the prompt lengths over 1 to maxPrompt, half of them at block and chunk borders.
func makeCases(n int) []*testCase {
	r := rand.New(rand.NewPCG(20, 26))
	borders := []int{1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, maxPrompt}
	cases := make([]*testCase, n)
	for i := range cases {
		length := 1 + r.IntN(maxPrompt)
		if i%2 == 0 {
			length = borders[i/2%len(borders)]
		}
		tc := &testCase{Index: i, Tokens: length, MaxTokens: 8 + r.IntN(41), Seeded: i%4 >= 2, Streamed: i%3 != 0}
		for range length {
			tc.Prompt = append(tc.Prompt, 10+r.IntN(1990))
		}
		cases[i] = tc
	}
	return cases
}

func (tc *testCase) send(ctx context.Context, c *client.Client, model string, r *run) error {
	ctx, cancel := context.WithTimeout(ctx, caseTimeout)
	defer cancel()
	f := map[string]any{
		"model": model, "prompt": tc.Prompt, "max_tokens": tc.MaxTokens, "temperature": 0, "stream": tc.Streamed, "seed": 1000 + tc.Index,
	}
	if tc.Streamed {
		f["stream_options"] = map[string]any{"include_usage": true}
	}
	if tc.Seeded {
		f["temperature"], f["top_p"] = 0.8, 0.95
	}
	id := newID(fmt.Sprintf("verify-%s-%d", r.Style, tc.Index))
	res, err := c.Do(ctx, client.Request{ID: id, Fields: f})
	if err != nil {
		return err
	}
	if res.Usage == nil || res.Usage.PromptTokens != tc.Tokens {
		return fmt.Errorf("usage %+v, want %d prompt tokens", res.Usage, tc.Tokens)
	}
	r.text, r.end = res.Text, fmt.Sprintf("%s after %d tokens", res.FinishReason, res.Usage.CompletionTokens)
	l, err := c.Whole(ctx, id)
	if err != nil {
		return err
	}
	if !l.Complete {
		return fmt.Errorf("timeline lacks %v", l.Missing)
	}
	r.Ctx, r.Gen = l.Node("ctx"), l.Node("gen")
	if l.Handover != nil {
		r.KVBytes = l.Handover.Bytes
	}
	return r.moved(tc.reuse)
}

// moved checks that a disaggregated run used two nodes and moved KV, unless the receiver may have had all of it.
func (r *run) moved(reuse bool) error {
	if r.Style == "aggregated" {
		return nil
	}
	if r.Ctx == "" || r.Gen == "" || (r.KVBytes <= 0 && !reuse) {
		return fmt.Errorf("ran on ctx node %q and gen node %q with %d KV bytes moved, want two nodes and more than 0", r.Ctx, r.Gen, r.KVBytes)
	}
	return nil
}

func (r *run) name(c *cluster.Cluster) {
	if p := c.Find(r.Ctx); p != nil {
		r.CtxPID = p.PID()
	}
	if p := c.Find(r.Gen); p != nil {
		r.GenPID = p.PID()
	}
}

func (tc *testCase) compare() {
	tc.Equal = true
	for _, r := range tc.Runs {
		if r.Error != "" || r.text != tc.Runs[0].text || r.end != tc.Runs[0].end {
			tc.Equal = false
		}
	}
}

// String is the line that a person reads.
func (tc *testCase) String() string {
	var b strings.Builder
	how := map[bool]string{true: "seeded", false: "greedy"}[tc.Seeded] + map[bool]string{true: ", streamed", false: ""}[tc.Streamed]
	fmt.Fprintf(&b, "case %d: %s, %d prompt tokens (%s)", tc.Index, map[bool]string{true: "equal", false: "DIFFERENT"}[tc.Equal], tc.Tokens, how)
	for _, r := range tc.Runs {
		fmt.Fprintf(&b, "; %s:", r.Style)
		if r.Ctx != "" {
			fmt.Fprintf(&b, " %s pid %d", r.Ctx, r.CtxPID)
		}
		if r.Gen != "" {
			fmt.Fprintf(&b, " %s pid %d", r.Gen, r.GenPID)
		}
		fmt.Fprintf(&b, " %d KV bytes", r.KVBytes)
		switch {
		case r.Error != "":
			fmt.Fprintf(&b, " ERROR %s", r.Error)
		case !tc.Equal:
			fmt.Fprintf(&b, " %s %.60q", r.end, r.text)
		}
	}
	return b.String()
}

func (v *verify) print(cases []*testCase) error {
	equal := 0
	for _, tc := range cases {
		if tc.Equal {
			equal++
		}
	}
	fmt.Printf("%d of %d cases equal in %s\n", equal, len(cases), strings.Join(styles(), ", "))
	if v.JSON {
		b, err := json.Marshal(map[string]any{"cases": v.Cases, "equal": equal, "styles": styles(), "results": cases})
		if err != nil {
			return err
		}
		fmt.Println(string(b))
	}
	if equal != v.Cases {
		return fmt.Errorf("%d of %d cases differ", v.Cases-equal, v.Cases)
	}
	return nil
}
