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
	s := &scanner{b: body}
	a := new(CtxAnswer)
	for more := s.enter('{'); more; more = s.more('{') {
		switch key := s.key(); string(key) {
		case "usage":
			a.Usage = nil
			if !s.null() {
				a.Usage = s.usage()
			}
		case "prompt_token_ids":
			a.PromptTokenIDs = s.take()
		case "choices":
			if !s.null() {
				s.ctxChoices(a)
			}
		default:
			s.skip()
		}
	}
	s.end()
	if s.err != nil {
		return nil, fmt.Errorf("context answer: %w", s.err)
	}
	if len(a.Choices) == 0 {
		return nil, fmt.Errorf("context answer: no choices")
	}
	return a, nil
}

func (s *scanner) ctxChoices(a *CtxAnswer) {
	for more := s.enter('['); more; more = s.more('[') {
		a.Choices = append(a.Choices, CtxChoice{})
		c := &a.Choices[len(a.Choices)-1]
		for more := s.enter('{'); more; more = s.more('{') {
			switch key := s.key(); string(key) {
			case "finish_reason":
				c.Finish = s.text(key, s.take())
			case "text":
				c.Text = s.text(key, s.take())
			case "message":
				if !s.null() {
					c.Message.Content = s.content()
				}
			case "disaggregated_params":
				c.Disagg = s.take()
			case "stop_reason":
				c.Stop = s.take()
			case "logprobs":
				c.Logprobs = s.take()
			default:
				s.skip()
			}
		}
	}
}

// content walks over a message.
func (s *scanner) content() (text string) {
	for more := s.enter('{'); more; more = s.more('{') {
		if key := s.key(); string(key) == "content" {
			text = s.text(key, s.take())
		} else {
			s.skip()
		}
	}
	return text
}

// text is the string in v, or "" for null; an error names the key.
func (s *scanner) text(key, v []byte) string {
	if s.err != nil || isNull(v) {
		return ""
	}
	text, err := decodeString(v)
	if err != nil {
		s.err = fmt.Errorf("%s: want %w", key, err)
	}
	return text
}

// ParseUsage reads a usage object as encoding/json does, for the members that Usage has; every leg brings one.
func ParseUsage(v []byte) (*Usage, error) {
	s := &scanner{b: v}
	u := s.usage()
	if s.end(); s.err != nil {
		return nil, errUsage
	}
	return u, nil
}

// usage walks over a usage object.
func (s *scanner) usage() *Usage {
	u := &Usage{NoPrompt: true, NoCompletion: true}
	for more := s.enter('{'); more; more = s.more('{') {
		key, v := s.key(), s.take()
		if s.err != nil {
			break
		}
		var err error
		switch string(key) {
		case "prompt_tokens":
			u.NoPrompt = isNull(v)
			err = setCount(&u.PromptTokens, v)
		case "completion_tokens":
			u.NoCompletion = isNull(v)
			err = setCount(&u.CompletionTokens, v)
		case "total_tokens":
			err = setCount(&u.TotalTokens, v)
		case "prompt_tokens_details":
			if !isNull(v) {
				u.PromptTokensDetails = new(PromptTokensDetails)
				if err = json.Unmarshal(v, u.PromptTokensDetails); err == nil && u.PromptTokensDetails.CachedTokens < 0 {
					err = errUsage
				}
			}
		}
		if err != nil {
			s.err = fmt.Errorf("usage: want %w", errUsage)
		}
	}
	return u
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
