package openai

import (
	"encoding/json"
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"
	"github.com/openai/openai-go/v3/shared"

	"meridian.internal/e2e/cluster"
)

const opening = "Once upon a time, in a small village by the sea, there lived"

func ofPrompt(text string, maxTokens int64) openai.CompletionNewParams {
	return openai.CompletionNewParams{
		Model: model, MaxTokens: openai.Int(maxTokens), Temperature: openai.Float(0), Prompt: openai.CompletionNewParamsPromptUnion{OfString: openai.String(text)},
	}
}

func ofChat(text string, maxTokens int64) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model: model, MaxCompletionTokens: openai.Int(maxTokens), Temperature: openai.Float(0), Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage(text)},
	}
}

func TestFieldsOfTheAPI(t *testing.T) {
	c := dial(up(t, "generation_first").Routers[0])
	t.Run("what is not supported is refused by its name", func(t *testing.T) { refused(t, c) })
	t.Run("logprobs of a chat", func(t *testing.T) { chatLogprobs(t, c) })
	t.Run("logprobs of a completion", func(t *testing.T) { completionLogprobs(t, c) })
	t.Run("stop strings end the text before them", func(t *testing.T) { stops(t, c) })
	t.Run("n choices", func(t *testing.T) { choices(t, c) })
	t.Run("user is taken, within bounds", func(t *testing.T) {
		p := ofChat("Hello.", 4)
		p.User = openai.String("user-1234")
		if _, err := c.Chat.Completions.New(t.Context(), p); err != nil {
			t.Error(err)
		}
		p.User = openai.String(strings.Repeat("u", 100_000))
		wantRefused(t, c, "user", p)
	})
	t.Run("usage counts the prompt's cached tokens", func(t *testing.T) { cached(t, c) })
}

func wantRefused(t *testing.T, c openai.Client, field string, p openai.ChatCompletionNewParams) {
	t.Helper()
	_, err := c.Chat.Completions.New(t.Context(), p)
	var e *openai.Error
	if !errors.As(err, &e) || e.StatusCode != 400 || e.Param != field || e.Type != "invalid_request_error" || !strings.Contains(e.Message, field) {
		t.Errorf("%s: %v, want a 400 that names the field", field, err)
	}
}

func refused(t *testing.T, c openai.Client) {
	tools := ofChat("What is the weather?", 4)
	tools.Tools = []openai.ChatCompletionToolUnionParam{openai.ChatCompletionFunctionTool(shared.FunctionDefinitionParam{Name: "weather"})}
	wantRefused(t, c, "tools", tools)
	tools.ToolChoice = openai.ChatCompletionToolChoiceOptionUnionParam{OfAuto: openai.String("none")}
	if _, err := c.Chat.Completions.New(t.Context(), tools); err != nil {
		t.Errorf("tools that are not to be called: %v", err)
	}
	format := ofChat("Answer in JSON.", 4)
	format.ResponseFormat = openai.ChatCompletionNewParamsResponseFormatUnion{OfJSONObject: &shared.ResponseFormatJSONObjectParam{}}
	wantRefused(t, c, "response_format", format)
	format.ResponseFormat = openai.ChatCompletionNewParamsResponseFormatUnion{OfText: &shared.ResponseFormatTextParam{}}
	if _, err := c.Chat.Completions.New(t.Context(), format); err != nil {
		t.Errorf("plain text asked for: %v", err)
	}
	tooMany := ofChat("Hello.", 4)
	tooMany.N = openai.Int(100_000)
	wantRefused(t, c, "n", tooMany)
}

func chatLogprobs(t *testing.T, c openai.Client) {
	p := ofChat(opening, 12)
	p.Logprobs, p.TopLogprobs = openai.Bool(true), openai.Int(3)
	whole, err := c.Chat.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	var text []byte
	for i, l := range whole.Choices[0].Logprobs.Content {
		for _, b := range l.Bytes {
			text = append(text, byte(b))
		}
		if l.Logprob > 0 || len(l.TopLogprobs) != 3 || l.TopLogprobs[0].Logprob < l.TopLogprobs[1].Logprob || l.TopLogprobs[0].Token != l.Token {
			t.Errorf("token %d, the likeliest as temperature is 0: %s", i, l.RawJSON())
		}
	}
	if content := whole.Choices[0].Message.Content; string(text) != content || content == "" {
		t.Errorf("the tokens' bytes are %q, the text is %q", text, content)
	}
	stream := c.Chat.Completions.NewStreaming(t.Context(), p)
	defer stream.Close()
	n := 0
	for stream.Next() {
		for _, ch := range stream.Current().Choices {
			for _, l := range ch.Logprobs.Content {
				if want := whole.Choices[0].Logprobs.Content; n >= len(want) || want[n].Token != l.Token || want[n].Logprob != l.Logprob {
					t.Errorf("streamed token %d is %s", n, l.RawJSON())
				}
				n++
			}
		}
	}
	if err := stream.Err(); err != nil || n != len(whole.Choices[0].Logprobs.Content) {
		t.Errorf("%d logprobs streamed, %d in the whole answer, %v", n, len(whole.Choices[0].Logprobs.Content), err)
	}
}

func completionLogprobs(t *testing.T, c openai.Client) {
	p := ofPrompt(opening, 12)
	p.Logprobs = openai.Int(2)
	res, err := c.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	l := res.Choices[0].Logprobs
	if strings.Join(l.Tokens, "") != res.Choices[0].Text || len(l.TokenLogprobs) != len(l.Tokens) || len(l.TopLogprobs) != len(l.Tokens) || int64(len(l.Tokens)) != res.Usage.CompletionTokens {
		t.Errorf("logprobs %s of %q, usage %+v", l.RawJSON(), res.Choices[0].Text, res.Usage)
	}
	for i, top := range l.TopLogprobs {
		if len(top) != 2 || l.TokenLogprobs[i] > 0 || top[l.Tokens[i]] != l.TokenLogprobs[i] {
			t.Errorf("token %d: %q, %v of %v", i, l.Tokens[i], l.TokenLogprobs[i], top)
		}
	}
}

func stops(t *testing.T, c openai.Client) {
	whole, err := c.Completions.New(t.Context(), ofPrompt(opening, 32))
	if err != nil {
		t.Fatal(err)
	}
	text := whole.Choices[0].Text
	stop := text[len(text)/2 : len(text)/2+4] // crosses tokens as it falls
	want := text[:strings.Index(text, stop)]
	p := ofPrompt(opening, 32)
	p.Stop = openai.CompletionNewParamsStopUnion{OfStringArray: []string{"\x01 never", stop}}
	res, err := c.Completions.New(t.Context(), p)
	if err != nil || res.Choices[0].Text != want || res.Choices[0].FinishReason != "stop" {
		t.Errorf("stop %q: %v, %v; want %q", stop, res, err, want)
	}
	stream := c.Completions.NewStreaming(t.Context(), p)
	defer stream.Close()
	var got strings.Builder
	var reason openai.CompletionChoiceFinishReason
	for stream.Next() {
		for _, ch := range stream.Current().Choices {
			got.WriteString(ch.Text)
			reason = max(reason, ch.FinishReason)
		}
	}
	if err := stream.Err(); err != nil || got.String() != want || reason != "stop" {
		t.Errorf("streamed with stop %q: %q, finish_reason %q, %v; want %q", stop, &got, reason, err, want)
	}
}

func choices(t *testing.T, c openai.Client) {
	p := ofChat(opening, 12)
	p.N, p.Seed, p.Temperature = openai.Int(3), openai.Int(11), openai.Float(1)
	var before []string
	for range 2 {
		res, err := c.Chat.Completions.New(t.Context(), p)
		if err != nil || len(res.Choices) != 3 {
			t.Fatalf("%v, %v", res, err)
		}
		var texts []string
		for i, ch := range res.Choices {
			if ch.Index != int64(i) || ch.FinishReason == "" {
				t.Errorf("choice %d: %s", i, ch.RawJSON())
			}
			texts = append(texts, ch.Message.Content)
		}
		if texts[0] == texts[1] && texts[1] == texts[2] {
			t.Errorf("three choices at temperature 1 are all %q", texts[0])
		}
		if before != nil && strings.Join(texts, "|") != strings.Join(before, "|") {
			t.Errorf("with the same seed %q, before %q", texts, before)
		}
		before = texts
		if u := res.Usage; u.TotalTokens != u.PromptTokens+u.CompletionTokens || u.CompletionTokens > 36 || u.CompletionTokens < 3 {
			t.Errorf("usage %s: the prompt counts once, the tokens of all choices count", u.RawJSON())
		}
	}
}

// cached: what the context node held of the prompt is in the usage, though another node generates the answer.
func cached(t *testing.T, c openai.Client) {
	p := ofPrompt(strings.Repeat(opening+" ", 12)+"a cat.", 4)
	first, err := c.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	again, err := c.Completions.New(t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	was, is := first.Usage.PromptTokensDetails.CachedTokens, again.Usage.PromptTokensDetails.CachedTokens
	if is <= was || is >= again.Usage.PromptTokens || is < again.Usage.PromptTokens/2 {
		t.Errorf("%d of %d tokens were cached at first, then %d", was, again.Usage.PromptTokens, is)
	}
	p.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
	stream := c.Completions.NewStreaming(t.Context(), p)
	defer stream.Close()
	var last openai.Completion
	for stream.Next() {
		last = stream.Current()
	}
	if err := stream.Err(); err != nil || len(last.Choices) != 0 || last.Usage.PromptTokensDetails.CachedTokens != is || last.Usage.PromptTokens != again.Usage.PromptTokens {
		t.Errorf("the stream's last chunk is %s, %v; want %d cached tokens", last.RawJSON(), err, is)
	}
}

// The only generation node dies under a stream: nobody can go on, and the client is told so in one event that it can read.
func TestABrokenStreamEndsWithOneErrorThatTheClientReads(t *testing.T) {
	// Slow enough that the node dies under the stream, whoever waits for a processor.
	cl := start(t, cluster.Config{Schedules: []string{"generation_first"}, Device: "sim", NodeArgs: []string{"--sim-step=10ms", "--sim-shallow"}})
	c := dial(cl.Routers[0])
	stream := c.Chat.Completions.NewStreaming(t.Context(), ofChat(opening, 1000), option.WithJSONSet("ignore_eos", true))
	defer stream.Close()
	if !stream.Next() {
		t.Fatal(stream.Err())
	}
	if err := cl.Find("gen0").Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	for stream.Next() {
		if len(stream.Current().Choices) > 0 && stream.Current().Choices[0].FinishReason != "" {
			t.Fatalf("the stream ended as if nothing had been: %s", stream.Current().RawJSON())
		}
	}
	var e *ssestream.StreamError
	if !errors.As(stream.Err(), &e) {
		t.Fatalf("error %v, want one that came as an event", stream.Err())
	}
	var body struct {
		Error struct {
			Message, Type, Stage string
			RequestID            string `json:"request_id"`
			Code                 int
		}
	}
	if err := json.Unmarshal(e.Event.Data, &body); err != nil || body.Error.Message == "" || body.Error.Type == "" || body.Error.Stage == "" || body.Error.RequestID == "" {
		t.Errorf("event %q: %+v, %v", e.Event.Data, body, err)
	}
	if stream.Next() {
		t.Errorf("after it came %s", stream.Current().RawJSON())
	}
}
