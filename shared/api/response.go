package api

import (
	"encoding/json"
	"math"
	"strconv"

	"meridian.internal/shared/jsonline"
)

// Head is what all bodies of one answer have in common.
type Head struct {
	ID      string // cmpl-... or chatcmpl-...
	Model   string
	Created int64 // seconds since 1970
	Chat    bool
}

// Choice is one choice of a chunk or of a whole answer.
type Choice struct {
	Index      int
	Text       string
	Role       bool    // chat chunks: send the role (first chunk of a choice)
	TokenIDs   []int32 // nil: no token_ids member
	Finish     string  // "": null
	StopReason json.RawMessage
	Logprobs   []TokenLogprob // nil: null
	// For a router that assembles an answer: parts as a worker sent them.
	RawText     []byte   // inside of a JSON string; used when Text is empty
	RawLogprobs []byte   // used when Logprobs is nil
	Message     *Message // chat, not a chunk: what a worker said beside content; nil: nothing
	Disagg      *DisaggParams
}

// TokenLogprob is one token with its logprob and the most likely alternatives.
type TokenLogprob struct {
	Text    string
	Bytes   []byte
	Logprob float32
	Offset  int            // completions: position of Text in the answer's text
	Top     []TokenLogprob // most likely first
}

// AppendChunk appends the chunk object of a stream with one choice (no "data:", no newline).
func (h Head) AppendChunk(dst []byte, c Choice) []byte {
	dst = h.appendOpen(dst, true)
	dst = append(dst, `"choices":[`...)
	dst = h.appendChoice(dst, c, true)
	return append(dst, "]}"...)
}

// AppendUsageChunk appends the last chunk of a stream with include_usage: no choices, only usage.
func (h Head) AppendUsageChunk(dst []byte, u Usage) []byte {
	dst = h.appendOpen(dst, true)
	dst = append(dst, `"choices":[],"usage":`...)
	dst = AppendUsage(dst, u)
	return append(dst, '}')
}

// AppendResponse appends the body of an answer that is not streamed. promptIDs is TensorRT-LLM's prompt_token_ids; nil
// leaves it out.
func (h Head) AppendResponse(dst []byte, choices []Choice, u Usage, promptIDs []int32) []byte {
	dst = h.appendOpen(dst, false)
	dst = append(dst, `"choices":[`...)
	for i, c := range choices {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = h.appendChoice(dst, c, false)
	}
	dst = append(dst, `],"usage":`...)
	dst = AppendUsage(dst, u)
	if promptIDs != nil {
		dst = append(dst, `,"prompt_token_ids":`...)
		dst = AppendIDs(dst, promptIDs)
	}
	return append(dst, '}')
}

// Object is the object member of a body.
func (h Head) Object(chunk bool) string {
	switch {
	case h.Chat && chunk:
		return "chat.completion.chunk"
	case h.Chat:
		return "chat.completion"
	default:
		return "text_completion"
	}
}

func (h Head) appendOpen(dst []byte, chunk bool) []byte {
	dst = append(dst, `{"id":`...)
	dst = jsonline.AppendString(dst, h.ID)
	dst = append(dst, `,"object":"`...)
	dst = append(dst, h.Object(chunk)...)
	dst = append(dst, `","created":`...)
	dst = strconv.AppendInt(dst, h.Created, 10)
	dst = append(dst, `,"model":`...)
	dst = jsonline.AppendString(dst, h.Model)
	return append(dst, ',')
}

func (h Head) appendChoice(dst []byte, c Choice, chunk bool) []byte {
	dst = append(dst, `{"index":`...)
	dst = strconv.AppendInt(dst, int64(c.Index), 10)
	dst = h.appendText(dst, c, chunk)
	dst = append(dst, `,"logprobs":`...)
	switch {
	case c.Logprobs == nil && c.RawLogprobs != nil:
		dst = append(dst, c.RawLogprobs...)
	case c.Logprobs == nil:
		dst = append(dst, "null"...)
	case h.Chat:
		dst = appendChatLogprobs(dst, c.Logprobs)
	default:
		dst = appendLogprobs(dst, c.Logprobs)
	}
	dst = append(dst, `,"finish_reason":`...)
	if c.Finish == "" {
		dst = append(dst, "null"...)
	} else {
		dst = jsonline.AppendString(dst, c.Finish)
	}
	if len(c.StopReason) > 0 {
		dst = append(dst, `,"stop_reason":`...)
		dst = append(dst, c.StopReason...)
	}
	if c.TokenIDs != nil {
		dst = append(dst, `,"token_ids":`...)
		dst = AppendIDs(dst, c.TokenIDs)
	}
	if c.Disagg != nil {
		if b, err := json.Marshal(c.Disagg); err == nil { // plain data: cannot fail
			dst = append(dst, `,"disaggregated_params":`...)
			dst = append(dst, b...)
		}
	}
	return append(dst, '}')
}

func (h Head) appendText(dst []byte, c Choice, chunk bool) []byte {
	if !h.Chat {
		dst = append(dst, `,"text":`...)
		return c.appendText(dst)
	}
	if !chunk {
		dst = append(dst, `,"message":{"role":"assistant","content":`...)
		if c.Message.hasCalls() && c.Text == "" && len(c.RawText) == 0 {
			dst = append(dst, "null"...) // OpenAI's way of saying that the calls are the answer
		} else {
			dst = c.appendText(dst)
		}
		return append(c.Message.appendMembers(dst), '}')
	}
	dst = append(dst, `,"delta":{`...)
	if c.Role {
		dst = append(dst, `"role":"assistant",`...)
	}
	if c.Role || c.Text != "" || c.Finish == "" {
		dst = append(dst, `"content":`...)
		dst = c.appendText(dst)
	}
	return append(dst, '}')
}

func (c Choice) appendText(dst []byte) []byte {
	if c.Text == "" && c.RawText != nil {
		return append(append(append(dst, '"'), c.RawText...), '"')
	}
	return jsonline.AppendString(dst, c.Text)
}

// AppendUsage appends a usage object.
func AppendUsage(dst []byte, u Usage) []byte {
	dst = appendCount(append(dst, `{"prompt_tokens":`...), u.PromptTokens, !u.NoPrompt)
	dst = appendCount(append(dst, `,"completion_tokens":`...), u.CompletionTokens, !u.NoCompletion)
	dst = appendCount(append(dst, `,"total_tokens":`...), u.TotalTokens, !u.NoPrompt && !u.NoCompletion)
	if u.PromptTokensDetails != nil {
		dst = append(dst, `,"prompt_tokens_details":{"cached_tokens":`...)
		dst = strconv.AppendInt(dst, int64(u.PromptTokensDetails.CachedTokens), 10)
		dst = append(dst, '}')
	}
	return append(dst, '}')
}

func appendCount(dst []byte, n int, known bool) []byte {
	if !known {
		return append(dst, "null"...)
	}
	return strconv.AppendInt(dst, int64(n), 10)
}

// appendFloat appends a logprob; JSON has no infinities, so an impossible token gets the lowest float32.
func appendFloat(dst []byte, f float32) []byte {
	if f != f || f < -math.MaxFloat32 {
		f = -math.MaxFloat32
	}
	return strconv.AppendFloat(dst, float64(f), 'g', -1, 32)
}

// appendLogprobs appends the parallel arrays of /v1/completions.
func appendLogprobs(dst []byte, lps []TokenLogprob) []byte {
	list := func(name string, item func(TokenLogprob)) {
		dst = append(dst, name...)
		for i, lp := range lps {
			if i > 0 {
				dst = append(dst, ',')
			}
			item(lp)
		}
		dst = append(dst, ']')
	}
	list(`{"tokens":[`, func(lp TokenLogprob) { dst = jsonline.AppendString(dst, lp.Text) })
	list(`,"token_logprobs":[`, func(lp TokenLogprob) { dst = appendFloat(dst, lp.Logprob) })
	list(`,"top_logprobs":[`, func(lp TokenLogprob) {
		if lp.Top == nil {
			dst = append(dst, "null"...)
			return
		}
		dst = append(dst, '{')
		for i, t := range lp.Top {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = jsonline.AppendString(dst, t.Text)
			dst = append(dst, ':')
			dst = appendFloat(dst, t.Logprob)
		}
		dst = append(dst, '}')
	})
	list(`,"text_offset":[`, func(lp TokenLogprob) { dst = strconv.AppendInt(dst, int64(lp.Offset), 10) })
	return append(dst, '}')
}

// appendChatLogprobs appends the content array of chat.
func appendChatLogprobs(dst []byte, lps []TokenLogprob) []byte {
	dst = append(dst, `{"content":[`...)
	for i, lp := range lps {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendChatToken(dst, lp)
		dst = append(dst, `,"top_logprobs":[`...)
		for j, t := range lp.Top {
			if j > 0 {
				dst = append(dst, ',')
			}
			dst = append(appendChatToken(dst, t), '}')
		}
		dst = append(dst, "]}"...)
	}
	return append(dst, "]}"...)
}

func appendChatToken(dst []byte, lp TokenLogprob) []byte {
	dst = append(dst, `{"token":`...)
	dst = jsonline.AppendString(dst, lp.Text)
	dst = append(dst, `,"logprob":`...)
	dst = appendFloat(dst, lp.Logprob)
	dst = append(dst, `,"bytes":[`...)
	for i, b := range lp.Bytes {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendUint(dst, uint64(b), 10)
	}
	return append(dst, ']')
}
