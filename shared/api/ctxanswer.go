package api

import (
	"encoding/json"
	"fmt"
	"math"
)

// CtxAnswer is what a router needs of a context leg's answer. Opaque parts stay as sent.
type CtxAnswer struct {
	Usage          *Usage
	PromptTokenIDs json.RawMessage // flat or nested, passed on as it came
	Choices        []CtxChoice
}

// CtxChoice is a choice of a context leg's answer.
type CtxChoice struct {
	Finish string
	Disagg json.RawMessage
	Stop   json.RawMessage
	// Text and Message hold the first token's text; Logprobs its logprob.
	Text     string
	Logprobs json.RawMessage
	Message  struct{ Content string }
}

// GoesOn tells whether generation is pending after the first token; otherwise the answer is complete.
func (c CtxChoice) GoesOn() bool { return c.Finish == "length" || c.Finish == "not_finished" }

// ParseCtxAnswer reads the answer of a context leg; it wants at least one choice. What it returns aliases body: a long
// prompt comes back in it, and is not decoded.
func ParseCtxAnswer(body []byte) (*CtxAnswer, error) {
	var arr [16]Field
	fields, err := SplitObject(arr[:0], body)
	if err != nil {
		return nil, fmt.Errorf("context answer: %w", err)
	}
	a := new(CtxAnswer)
	for _, f := range fields {
		switch string(f.Key) {
		case "usage":
			a.Usage, err = parseUsage(f.Value)
		case "prompt_token_ids":
			a.PromptTokenIDs = json.RawMessage(f.Value)
		case "choices":
			err = a.parseChoices(f.Value)
		}
		if err != nil {
			return nil, fmt.Errorf("context answer: %s: want %w", f.Key, err)
		}
	}
	if len(a.Choices) == 0 {
		return nil, fmt.Errorf("context answer: no choices")
	}
	return a, nil
}

func (a *CtxAnswer) parseChoices(v []byte) error {
	if isNull(v) {
		return nil
	}
	var bad error
	err := eachElement(v, func(elem []byte) bool {
		var c CtxChoice
		bad = c.parse(elem)
		a.Choices = append(a.Choices, c)
		return bad == nil
	})
	if bad != nil {
		return bad
	}
	return err
}

func (c *CtxChoice) parse(elem []byte) error {
	var arr [12]Field
	fields, err := SplitObject(arr[:0], elem)
	if err != nil {
		return err
	}
	for _, f := range fields {
		switch string(f.Key) {
		case "finish_reason":
			c.Finish, err = stringOrNull(f.Value)
		case "text":
			c.Text, err = stringOrNull(f.Value)
		case "message":
			err = c.parseMessage(f.Value)
		case "disaggregated_params":
			c.Disagg = json.RawMessage(f.Value)
		case "stop_reason":
			c.Stop = json.RawMessage(f.Value)
		case "logprobs":
			c.Logprobs = json.RawMessage(f.Value)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (c *CtxChoice) parseMessage(v []byte) error {
	if isNull(v) {
		return nil
	}
	var arr [6]Field
	fields, err := SplitObject(arr[:0], v)
	for _, f := range fields {
		if string(f.Key) == "content" && err == nil {
			c.Message.Content, err = stringOrNull(f.Value)
		}
	}
	return err
}

func stringOrNull(v []byte) (string, error) {
	if isNull(v) {
		return "", nil
	}
	return decodeString(v)
}

// parseUsage reads a usage object; nil for null.
func parseUsage(v []byte) (*Usage, error) {
	if isNull(v) {
		return nil, nil
	}
	return ParseUsage(v)
}

// ParseUsage reads a usage object as encoding/json does, for the members that Usage has; every leg brings one.
func ParseUsage(v []byte) (*Usage, error) {
	var few [8]Field
	fields, err := SplitObject(few[:0], v)
	if err != nil {
		return nil, errUsage
	}
	u := &Usage{NoPrompt: true, NoCompletion: true}
	for _, f := range fields {
		switch string(f.Key) {
		case "prompt_tokens":
			u.NoPrompt = isNull(f.Value)
			err = setCount(&u.PromptTokens, f.Value)
		case "completion_tokens":
			u.NoCompletion = isNull(f.Value)
			err = setCount(&u.CompletionTokens, f.Value)
		case "total_tokens":
			err = setCount(&u.TotalTokens, f.Value)
		case "prompt_tokens_details":
			if !isNull(f.Value) {
				u.PromptTokensDetails = new(PromptTokensDetails)
				if err = json.Unmarshal(f.Value, u.PromptTokensDetails); err == nil && u.PromptTokensDetails.CachedTokens < 0 {
					err = errUsage
				}
			}
		}
		if err != nil {
			return nil, errUsage
		}
	}
	return u, nil
}

func setCount(n *int, v []byte) error {
	if isNull(v) {
		return nil
	}
	i, err := decodeInt(v, 0, math.MaxInt64)
	*n = int(i)
	return err
}

var errUsage = errorWant("a usage object")
