// Command loadgen sends load to a router and prints a JSON summary: TTFT, ITL, TPOT and E2E percentiles and errors by
// kind. It owns the options; package load does the work.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/load"
	"meridian.internal/shared/serve"
)

func main() {
	os.Exit(serve.Run("loadgen", &options{}, serve.About("Send load to an OpenAI-compatible server and summarise how it went.")))
}

type options struct {
	URL          string        `help:"Server." default:"http://127.0.0.1:8080"`
	Model        string        `help:"Model; empty: the first that the server lists."`
	Requests     int           `help:"Requests in all; 0: until --duration is over." default:"100"`
	Duration     time.Duration `help:"No new request after this time; 0: no limit." default:"0s"`
	Concurrency  int           `help:"Closed loop: requests at a time. Open loop: the most at a time; further arrivals are shed and counted." default:"8"`
	Rate         float64       `help:"Open loop: arrivals a second, Poisson; 0: closed loop." default:"0"`
	PromptTokens load.Dist     `help:"Prompt length in tokens: N, uniform:MIN:MAX or lognormal:MEDIAN:SIGMA." default:"uniform:16:256" placeholder:"DIST"`
	OutputTokens load.Dist     `help:"max_tokens, as --prompt-tokens." default:"uniform:8:64" placeholder:"DIST"`
	Prefix       int           `help:"Tokens at the start of each prompt that others have too." default:"0"`
	Prefixes     int           `help:"Different ones of these, in turn." default:"1"`
	Turns        int           `help:"Chats instead: --requests conversations of so many turns, --concurrency at a time; each turn sends all that was said. 0: none." default:"0"`
	TurnWords    int           `help:"Words that a user says in a turn." default:"24"`
	Vocab        int           `help:"Token ids of prompts are below this." default:"2000"`
	Stream       bool          `help:"Stream the answers." default:"true" negatable:""`
	IgnoreEOS    bool          `help:"Let every answer reach its max_tokens." name:"ignore-eos" default:"true" negatable:""`
	Temperature  float64       `help:"0 is greedy." default:"0"`
	Seed         uint64        `help:"Of lengths, prompts and arrivals." default:"1"`
	Timeout      time.Duration `help:"Of one request; 0: none." default:"2m"`
	Quiet        bool          `help:"No progress on stderr."`
	FailOnError  bool          `help:"Exit 1 when any request failed, not only when all did."`
}

// Run sends the load.
func (o *options) Run(ctx context.Context, _ *slog.Logger) error {
	if _, err := serve.HostOf(o.URL); err != nil {
		return fmt.Errorf("--url %q: %w", o.URL, err)
	}
	if o.Turns > 0 && (o.Rate != 0 || o.Duration != 0 || o.Prefix != 0 || !o.Stream || !o.IgnoreEOS || o.Temperature != 0) {
		return fmt.Errorf("--turns %d: chats are a closed loop of --requests, streamed and greedy to their max_tokens: they take none of --rate, --duration, --prefix, --no-stream, --no-ignore-eos and --temperature", o.Turns)
	}
	if o.Model == "" {
		if err := o.firstModel(ctx); err != nil {
			return err
		}
	}
	progress := os.Stderr
	if o.Quiet {
		progress = nil
	}
	plan := load.Plan{
		URL: o.URL, Model: o.Model, Requests: o.Requests, Duration: o.Duration, Concurrency: o.Concurrency, Rate: o.Rate,
		Prompt: o.PromptTokens, Output: o.OutputTokens, Prefix: o.Prefix, Prefixes: o.Prefixes, Vocab: o.Vocab, Stream: o.Stream,
		IgnoreEOS: o.IgnoreEOS, Temperature: o.Temperature, Seed: o.Seed, Timeout: o.Timeout,
	}
	var sum load.Summary
	var err error
	if o.Turns > 0 {
		sum, err = load.Chat(ctx, load.Chats{
			URL: o.URL, Model: o.Model, Conversations: o.Requests, Turns: o.Turns, Concurrency: o.Concurrency, Words: o.TurnWords,
			Output: o.OutputTokens, Seed: o.Seed, Timeout: o.Timeout,
		})
	} else {
		sum, err = run(ctx, plan, progress)
	}
	if err != nil {
		return err
	}
	b, err := json.Marshal(sum)
	if err != nil {
		return err
	}
	fmt.Println(string(b))
	if sum.OK == 0 && sum.Requests > 0 {
		return fmt.Errorf("none of %d requests went well; the first: %s", sum.Requests, sum.FirstError)
	}
	if o.FailOnError && sum.OK != sum.Requests {
		return fmt.Errorf("%d of %d requests failed", sum.Requests-sum.OK, sum.Requests)
	}
	return nil
}

// run keeps a nil *os.File from becoming a writer that is not nil.
func run(ctx context.Context, p load.Plan, progress *os.File) (load.Summary, error) {
	if progress == nil {
		return load.Run(ctx, p, nil)
	}
	return load.Run(ctx, p, progress)
}

func (o *options) firstModel(ctx context.Context) error {
	c := client.New(o.URL, 1)
	defer c.Close()
	var models struct{ Data []struct{ ID string } }
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if err := c.Get(ctx, "/v1/models", &models); err != nil {
		return fmt.Errorf("list the models of %s: %w", o.URL, err)
	}
	if len(models.Data) == 0 {
		return errors.New("the server lists no model; give --model")
	}
	o.Model = models.Data[0].ID
	return nil
}
