package openai

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"meridian.internal/e2e/cluster"
)

const (
	model  = "meridian-tiny"
	prompt = "Once upon a time, there was a"
	tokens = 24
)

// start starts one node of each role and gives a client of the router.
func start(t *testing.T) *openai.Client {
	t.Helper()
	bin, err := cluster.Binaries()
	if err != nil {
		t.Skip("needs the built binaries (make test sets MERIDIAN_TEST_BIN): " + err.Error())
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	c, err := cluster.Start(ctx, cluster.Config{Bin: bin, Dir: t.TempDir(), Ctx: 1, Gen: 1, NoClocksync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	cl := openai.NewClient(option.WithBaseURL(c.URL()+"/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0))
	return &cl
}

// TestOpenAIClient asks for the same text four ways; greedy answers are the same with and without a stream.
func TestOpenAIClient(t *testing.T) {
	cl := start(t)
	t.Run("models are listed", func(t *testing.T) { models(t, cl) })
	t.Run("a completion streamed is the completion", func(t *testing.T) { completions(t, cl) })
	t.Run("a chat streamed is the chat", func(t *testing.T) { chats(t, cl) })
	t.Run("several choices come apart", func(t *testing.T) { choices(t, cl) })
	t.Run("an error is the library's error", func(t *testing.T) { refused(t, cl) })
}

func models(t *testing.T, cl *openai.Client) {
	page, err := cl.Models.List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(page.Data) != 1 || page.Data[0].ID != model {
		t.Errorf("models %+v, want %s", page.Data, model)
	}
}

func completions(t *testing.T, cl *openai.Client) {
	params := openai.CompletionNewParams{
		Model: model, Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String(prompt)},
		MaxTokens: openai.Int(tokens), Temperature: openai.Float(0),
	}
	whole, err := cl.Completions.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	if len(whole.Choices) != 1 || whole.Choices[0].Text == "" || whole.Usage.CompletionTokens != tokens || whole.Choices[0].FinishReason != "length" {
		t.Errorf("answer %s", whole.RawJSON())
	}
	params.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := cl.Completions.NewStreaming(t.Context(), params)
	defer stream.Close()
	text, finish, usage, chunks := "", "", int64(0), 0
	for stream.Next() {
		chunk := stream.Current()
		if len(chunk.Choices) > 0 {
			chunks++
			text += chunk.Choices[0].Text
			finish += string(chunk.Choices[0].FinishReason)
		}
		usage += chunk.Usage.CompletionTokens
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if text != whole.Choices[0].Text || finish != "length" || usage != tokens || chunks < 2 {
		t.Errorf("streamed %q, finish %q, usage %d, %d chunks; whole %q", text, finish, usage, chunks, whole.Choices[0].Text)
	}
}

func chats(t *testing.T, cl *openai.Client) {
	params := openai.ChatCompletionNewParams{
		Model: model, MaxTokens: openai.Int(tokens), Temperature: openai.Float(0),
		Messages: []openai.ChatCompletionMessageParamUnion{
			openai.SystemMessage("You tell stories."), openai.UserMessage("Tell me of a dog named Max."),
		},
	}
	whole, err := cl.Chat.Completions.New(t.Context(), params)
	if err != nil {
		t.Fatal(err)
	}
	if len(whole.Choices) != 1 || whole.Choices[0].Message.Role != "assistant" || whole.Usage.PromptTokens == 0 {
		t.Errorf("answer %s", whole.RawJSON())
	}
	params.StreamOptions.IncludeUsage = openai.Bool(true)
	stream := cl.Chat.Completions.NewStreaming(t.Context(), params)
	defer stream.Close()
	var all openai.ChatCompletionAccumulator
	for stream.Next() {
		if !all.AddChunk(stream.Current()) {
			t.Fatalf("the library cannot add chunk %s", stream.Current().RawJSON())
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if len(all.Choices) != 1 || all.Choices[0].Message.Content != whole.Choices[0].Message.Content ||
		all.Choices[0].FinishReason != whole.Choices[0].FinishReason || all.Usage.TotalTokens != whole.Usage.TotalTokens {
		t.Errorf("streamed %+v %+v\nwhole %s", all.Choices, all.Usage, whole.RawJSON())
	}
}

func choices(t *testing.T, cl *openai.Client) {
	stream := cl.Completions.NewStreaming(t.Context(), openai.CompletionNewParams{
		Model: model, Prompt: openai.CompletionNewParamsPromptUnion{OfArrayOfStrings: []string{prompt, "Lily and her mom"}},
		MaxTokens: openai.Int(8), N: openai.Int(2), Seed: openai.Int(7),
	})
	defer stream.Close()
	texts, finished := map[int64]string{}, map[int64]bool{}
	for stream.Next() {
		for _, c := range stream.Current().Choices {
			texts[c.Index] += c.Text
			finished[c.Index] = finished[c.Index] || c.FinishReason != ""
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	for i := range int64(4) {
		if texts[i] == "" || !finished[i] {
			t.Errorf("choice %d: %q, finished %v", i, texts[i], finished[i])
		}
	}
	if texts[0] == texts[1] {
		t.Errorf("two choices of one prompt are the same: %q", texts[0])
	}
}

func refused(t *testing.T, cl *openai.Client) {
	_, err := cl.Chat.Completions.New(t.Context(), openai.ChatCompletionNewParams{
		Model: "nobody", Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("hi")},
	})
	var api *openai.Error
	if !errors.As(err, &api) || api.StatusCode != 404 || api.Param != "model" || !strings.Contains(api.Message, "nobody") {
		t.Errorf("error %v, want a 404 that names the model", err)
	}
}
