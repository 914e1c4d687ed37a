package openai

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/clustertest"
)

const model = "meridian-tiny"

// up starts a cluster with one router for each schedule.
func up(t *testing.T, schedules ...string) *cluster.Cluster {
	t.Helper()
	return start(t, cluster.Config{Schedules: schedules})
}

// start starts a cluster of a node of each kind.
func start(t *testing.T, cfg cluster.Config) *cluster.Cluster {
	t.Helper()
	cfg.Bin, cfg.Dir, cfg.Ctx, cfg.Gen, cfg.Logger = clustertest.Binaries(t), t.TempDir(), 1, 1, slog.New(slog.DiscardHandler)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c, err := cluster.Start(ctx, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func dial(c *cluster.Process) openai.Client {
	return openai.NewClient(option.WithBaseURL(c.URL+"/v1/"), option.WithAPIKey("none"), option.WithMaxRetries(0), option.WithRequestTimeout(time.Minute))
}

func TestOpenAIClient(t *testing.T) {
	c := dial(up(t).Routers[0])
	t.Run("lists the model", func(t *testing.T) {
		page, err := c.Models.List(t.Context())
		if err != nil || len(page.Data) != 1 || page.Data[0].ID != model {
			t.Errorf("models %+v, %v", page, err)
		}
	})
	chat := openai.ChatCompletionNewParams{
		Model: model, Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Tell me a story.")},
		MaxCompletionTokens: openai.Int(24), Temperature: openai.Float(0), Seed: openai.Int(7),
	}
	var whole *openai.ChatCompletion
	t.Run("chats", func(t *testing.T) {
		var err error
		if whole, err = c.Chat.Completions.New(t.Context(), chat); err != nil {
			t.Fatal(err)
		}
		if len(whole.Choices) != 1 || whole.Choices[0].Message.Content == "" || whole.Usage.CompletionTokens == 0 || whole.Choices[0].FinishReason == "" {
			t.Errorf("answer %s", whole.RawJSON())
		}
	})
	t.Run("streams the same chat", func(t *testing.T) { streamChat(t, c, chat, whole) })
	t.Run("completes several prompts n times", func(t *testing.T) {
		res, err := c.Completions.New(t.Context(), openai.CompletionNewParams{
			Model: model, N: openai.Int(2), MaxTokens: openai.Int(6), Seed: openai.Int(3), Temperature: openai.Float(1),
			Prompt: openai.CompletionNewParamsPromptUnion{OfArrayOfStrings: []string{"Once upon a time", "One day"}},
		})
		if err != nil || len(res.Choices) != 4 {
			t.Fatalf("%v, %v", res, err)
		}
		for i, choice := range res.Choices {
			if choice.Index != int64(i) || choice.FinishReason == "" {
				t.Errorf("choice %d: %s", i, choice.RawJSON())
			}
		}
	})
	t.Run("understands an error", func(t *testing.T) {
		bad := chat
		bad.Model = "nothing"
		_, err := c.Chat.Completions.New(t.Context(), bad)
		var api *openai.Error
		if !errors.As(err, &api) || api.StatusCode != 404 || api.Message == "" {
			t.Errorf("error %v, want a 404 with a message", err)
		}
	})
}

func streamChat(t *testing.T, c openai.Client, chat openai.ChatCompletionNewParams, whole *openai.ChatCompletion) {
	chat.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
	stream := c.Chat.Completions.NewStreaming(t.Context(), chat)
	defer stream.Close()
	acc := openai.ChatCompletionAccumulator{}
	for stream.Next() {
		if !acc.AddChunk(stream.Current()) {
			t.Fatalf("chunk does not fit: %s", stream.Current().RawJSON())
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if whole == nil {
		t.Fatal("there is no whole answer to compare with")
	}
	if len(acc.Choices) != 1 || acc.Choices[0].Message.Content != whole.Choices[0].Message.Content {
		t.Errorf("streamed %+v, whole answer was %+v", acc.Choices, whole)
	}
	if acc.Usage.CompletionTokens != whole.Usage.CompletionTokens {
		t.Errorf("usage %+v, whole answer had %+v", acc.Usage, whole.Usage)
	}
}

// generation is one entry of the model's golden file.
type generation struct {
	Name      string  `json:"name"`
	PromptIDs []int64 `json:"prompt_ids"`
	Greedy    []int32 `json:"greedy_ids"`
	Text      string  `json:"greedy_text"`
}

func TestGoldenTextsInEveryServingStyle(t *testing.T) {
	b, err := os.ReadFile("../../gpu/model/meridian-tiny/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct{ Generation []generation }
	if err := json.Unmarshal(b, &golden); err != nil || len(golden.Generation) == 0 {
		t.Fatalf("%d generations, %v", len(golden.Generation), err)
	}
	styles := []string{"generation_first", "context_first", "aggregated"}
	cl := up(t, styles...)
	for i, style := range styles {
		c := dial(cl.Routers[i])
		for _, g := range golden.Generation {
			t.Run(style+" "+g.Name, func(t *testing.T) {
				res, err := c.Completions.New(t.Context(), openai.CompletionNewParams{
					Model: model, MaxTokens: openai.Int(int64(len(g.Greedy))), Temperature: openai.Float(0),
					Prompt: openai.CompletionNewParamsPromptUnion{OfArrayOfTokens: g.PromptIDs},
				})
				if err != nil {
					t.Fatal(err)
				}
				if got := res.Choices[0].Text; got != g.Text {
					t.Errorf("text %q, want %q", got, g.Text)
				}
			})
		}
	}
}
