package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

type demo struct {
	layout
	Requests  int  `help:"Prompts to send." default:"3"`
	MaxTokens int  `help:"Length of each answer, in tokens." default:"64"`
	JSON      bool `help:"Print the summary as one JSON object on the last line." name:"json"`
}

// report is the summary of a demo.
type report struct {
	Requests            int    `json:"requests"`
	Complete            int    `json:"complete"`
	Incomplete          int    `json:"incomplete"`
	NegativeSpans       int    `json:"negative_spans"`
	CausalityViolations int    `json:"causality_violations"`
	MaxBoundNS          *int64 `json:"max_bound_ns"`
	TTFTP50NS           *int64 `json:"ttft_p50_ns"`
	E2EP50NS            *int64 `json:"e2e_p50_ns"`
	KVBytes             int64  `json:"kv_bytes"`
	Traces              string `json:"traces"`
}

const demoTimeout = 2 * time.Minute // of one request

// Run plays the demo; the error says everything that was not as it should be.
func (d *demo) Run(ctx context.Context, log *slog.Logger) error {
	if d.Requests < 1 {
		return fmt.Errorf("--requests %d: want at least 1", d.Requests)
	}
	cfg, err := d.config(log)
	if err != nil {
		return err
	}
	c, err := start(ctx, cfg)
	if err != nil {
		return err
	}
	rep, shown, err := d.play(ctx, c)
	err = errors.Join(err, c.Stop())
	if shown != "" { // the last line may reach the disk only now
		fmt.Println()
		err = errors.Join(err, runTimeline(ctx, c.Traces(), "show", shown), runTimeline(ctx, c.Traces(), "check"))
	}
	if d.Dir == "" {
		for _, state := range []string{"nats", "spool"} { // what only a restart would need
			os.RemoveAll(filepath.Join(cfg.Dir, state))
		}
	}
	if jsonErr := d.print(rep); jsonErr != nil {
		return jsonErr
	}
	return err
}

// play sends the requests, and names the one whose timeline is worth a look; "": there is none.
func (d *demo) play(ctx context.Context, c *cluster.Cluster) (rep report, shown string, err error) {
	rep = report{Requests: d.Requests, Traces: c.Traces()}
	cl := client.New(c.URL(), 1)
	defer cl.Close()
	model := modelName(ctx, c)
	var lines []client.Line
	var problems error
	for i := range d.Requests {
		if ctx.Err() != nil {
			problems = errors.Join(problems, fmt.Errorf("%d of %d requests were not sent: %w", d.Requests-i, d.Requests, context.Cause(ctx)))
			rep.Requests = i
			break
		}
		id := newID(fmt.Sprintf("demo-%d", i))
		fmt.Printf("\n[%d] %s", i+1, prompt(i))
		if err := d.send(ctx, cl, model, id, prompt(i)); err != nil {
			problems = errors.Join(problems, fmt.Errorf("request %s: %w", id, err))
			fmt.Printf(" [%v]", err)
		}
		fmt.Println()
		l, err := cl.Whole(ctx, id)
		if err != nil {
			problems = errors.Join(problems, err)
			rep.Incomplete++
			continue
		}
		lines = append(lines, l)
		problems = errors.Join(problems, rep.add(id, l))
	}
	rep.summarise(lines)
	if len(lines) > 0 {
		shown = typical(lines).RequestID
	}
	return rep, shown, problems
}

func (d *demo) send(ctx context.Context, cl *client.Client, model, id, text string) error {
	ctx, cancel := context.WithTimeout(ctx, demoTimeout)
	defer cancel()
	res, err := cl.Do(ctx, client.Request{
		ID: id, OnText: func(s string) { fmt.Print(s) },
		Fields: map[string]any{
			"model": model, "prompt": text, "max_tokens": d.MaxTokens, "stream": true, "temperature": 0,
			"stream_options": map[string]any{"include_usage": true},
		},
	})
	if err != nil {
		return err
	}
	if res.Text == "" || res.FinishReason == "" || res.Usage == nil {
		return fmt.Errorf("answer lacks text (%d bytes), finish_reason (%q) or usage (%v)", len(res.Text), res.FinishReason, res.Usage)
	}
	return nil
}

// add counts a line, and says what is wrong with it.
func (r *report) add(id string, l client.Line) error {
	r.NegativeSpans += l.NegativeSpans
	r.CausalityViolations += len(l.Violations)
	if l.Handover != nil {
		r.KVBytes += l.Handover.Bytes
	}
	if l.Complete && l.Outcome == "finished" {
		r.Complete++
	} else {
		r.Incomplete++
	}
	var errs error
	if !l.Complete || l.Outcome != "finished" {
		errs = errors.Join(errs, fmt.Errorf("timeline of %s: outcome %s, complete %v, missing %v", id, l.Outcome, l.Complete, l.Missing))
	}
	if l.NegativeSpans > 0 || len(l.Violations) > 0 {
		errs = errors.Join(errs, fmt.Errorf("timeline of %s: %d negative spans, causality violations %v", id, l.NegativeSpans, l.Violations))
	}
	if l.Node("ctx") == "" || l.Node("gen") == "" {
		errs = errors.Join(errs, fmt.Errorf("timeline of %s: ran on ctx node %q and gen node %q, want one of each", id, l.Node("ctx"), l.Node("gen")))
	}
	return errs
}

func (r *report) summarise(lines []client.Line) {
	var ttft, e2e []int64
	for _, l := range lines {
		if l.TTFTNS != nil {
			ttft = append(ttft, *l.TTFTNS)
		}
		if l.E2ENS != nil {
			e2e = append(e2e, *l.E2ENS)
		}
		if l.MaxBoundNS != nil && (r.MaxBoundNS == nil || *l.MaxBoundNS > *r.MaxBoundNS) {
			r.MaxBoundNS = l.MaxBoundNS
		}
	}
	r.TTFTP50NS, r.E2EP50NS = median(ttft), median(e2e)
}

// typical is the line with the median E2E time; a failed one has none and comes first.
func typical(lines []client.Line) client.Line {
	var times []int64
	for _, l := range lines {
		if l.E2ENS != nil {
			times = append(times, *l.E2ENS)
		}
	}
	if mid := median(times); mid != nil {
		for _, l := range lines {
			if l.E2ENS != nil && *l.E2ENS == *mid {
				return l
			}
		}
	}
	return lines[0]
}

func (d *demo) print(r report) error {
	fmt.Printf("\n%d requests, %d complete timelines, %d negative spans, %d causality violations, %d KV bytes from node to node\n",
		r.Requests, r.Complete, r.NegativeSpans, r.CausalityViolations, r.KVBytes)
	fmt.Printf("TTFT p50 %s, E2E p50 %s, largest clock bound %s; timelines in %s\n", duration(r.TTFTP50NS), duration(r.E2EP50NS), duration(r.MaxBoundNS), r.Traces)
	if !d.JSON {
		return nil
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	fmt.Println(string(b))
	return nil
}

// duration is a time of three digits.
func duration(ns *int64) string {
	if ns == nil {
		return "unknown"
	}
	unit := time.Duration(1)
	for time.Duration(*ns)/unit >= 1000 {
		unit *= 10
	}
	return time.Duration(*ns).Round(unit).String()
}

// prompt is the i-th of any number of different prompts that suit the embedded model, which tells children's stories.
func prompt(i int) string {
	openings := []string{
		"Once upon a time, there was a", "Lily and her mom went to the", "One day, a little dog named Max", "Tom wanted to play with his",
		"In a big forest there lived a", "The sun was shining and Anna", "A small bird sat on the", "Ben found a shiny red",
	}
	text := openings[i%len(openings)]
	if round := i / len(openings); round > 0 {
		text = fmt.Sprintf("Story %d. %s", round+1, text)
	}
	return text
}
