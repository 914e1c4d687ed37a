package api

import (
	"strconv"

	"meridian.internal/shared/infer"
)

func itoa(n int) string { return strconv.Itoa(n) }

const wantPrompt = errorWant("a string, an array of token ids, or an array of those")

// setPrompt accepts the four forms: text, token ids, several texts, several arrays of ids.
func (r *Request) setPrompt(v []byte) error {
	if v[0] == '"' {
		r.Prompts = []Prompt{{text: v}}
		return nil
	}
	if v[0] != '[' {
		return wantPrompt
	}
	first := byte(0)
	if err := eachElement(v, func(elem []byte) bool { first = elem[0]; return false }); err != nil {
		return wantPrompt
	}
	if first != '"' && first != '[' {
		ids, err := decodeIDs(v)
		r.Prompts = []Prompt{{IDs: ids}}
		return err
	}
	var bad error
	err := eachElement(v, func(elem []byte) bool {
		var p Prompt
		if first == '"' && elem[0] == '"' {
			p.text = elem
		} else if first == '"' {
			bad = errString
		} else {
			p.IDs, bad = decodeIDs(elem)
		}
		r.Prompts = append(r.Prompts, p)
		return bad == nil && len(r.Prompts) <= defaultMaxChoices
	})
	if err != nil || bad != nil {
		return wantPrompt
	}
	return nil
}

func (r *Request) setMessages(v []byte) error {
	const want = errorWant("an array of messages, each an object with a role")
	if v[0] != '[' {
		return want
	}
	var bad *Error
	n := 0
	err := eachElement(v, func(elem []byte) bool {
		bad = checkMessage(n, elem)
		n++
		return bad == nil
	})
	if bad != nil {
		return bad
	}
	if err != nil {
		return want
	}
	if n == 0 {
		return Invalid("messages", "messages is empty")
	}
	r.Messages, r.Turns = v, n
	return nil
}

// checkMessage wants an object with a role and, where there is one, content that is text, null or parts.
func checkMessage(i int, elem []byte) *Error {
	name := "messages[" + itoa(i) + "]"
	var few [8]Field
	fields, err := SplitObject(few[:0], elem)
	if err != nil {
		return Invalid(name, "%s must be an object with a role", name)
	}
	if e := checkDuplicates(fields); e != nil {
		return within(name, e)
	}
	role := false
	for _, f := range fields {
		switch string(f.Key) {
		case "role":
			s, err := decodeString(f.Value)
			if err != nil || s == "" {
				return Invalid(name+".role", "%s.role must be a string that is not empty", name)
			}
			role = true
		case "content":
			if c := f.Value[0]; c != '"' && c != '[' && !isNull(f.Value) {
				return Invalid(name+".content", "%s.content must be a string, an array of parts or null", name)
			}
		}
	}
	if !role {
		return Invalid(name+".role", "%s.role is missing", name)
	}
	return nil
}

func defaultSampling() infer.Sampling { return infer.Sampling{Temperature: 1} }

// check validates what needs more than one field.
func (r *Request) check(lim Limits) *Error {
	if r.Model == "" {
		return Invalid("model", "model is missing")
	}
	if lim.KnowsModel != nil && !lim.KnowsModel(r.Model) {
		e := Invalid("model", "model %q is not served here", r.Model)
		e.Code, e.Type = 404, TypeNotFound
		return e
	}
	if e := r.checkInput(lim); e != nil {
		return e
	}
	if lim.ContextLen > 0 && r.MaxTokens != nil && *r.MaxTokens > lim.ContextLen {
		return Invalid(r.maxField, "%s is %d; this model's context has %d tokens", r.maxField, *r.MaxTokens, lim.ContextLen)
	}
	for _, s := range r.Stop {
		if s == "" || len(s) > maxStopLen {
			return Invalid("stop", "a stop string must have 1 to %d bytes", maxStopLen)
		}
	}
	if r.wantsTool && r.Tools == nil {
		return Invalid("tool_choice", "tool_choice wants a tool, and there is none in tools")
	}
	if e := r.CheckIDs(lim.VocabSize); e != nil {
		return e
	}
	return r.checkLogprobs()
}

// CheckIDs refuses token ids outside the vocabulary in what shapes the answer. 0: it is not known.
func (r *Request) CheckIDs(vocab int) *Error {
	if vocab <= 0 {
		return nil
	}
	for id := range r.Sampling.LogitBias {
		if int(id) >= vocab {
			return Invalid("logit_bias", "logit_bias names token %d; this model's vocabulary has %d tokens", id, vocab)
		}
	}
	return CheckVocab("stop_token_ids", r.StopTokenIDs, vocab)
}

func (r *Request) checkInput(lim Limits) *Error {
	if r.Chat {
		if r.Messages == nil {
			return Invalid("messages", "messages is missing")
		}
		return CheckVocab("prompt_token_ids", r.PromptTokenIDs, lim.VocabSize)
	}
	if len(r.Prompts) == 0 {
		return Invalid("prompt", "prompt is missing")
	}
	if len(r.Prompts)*r.N > lim.MaxChoices {
		return Invalid("n", "%d prompts times n = %d exceed the limit of %d choices", len(r.Prompts), r.N, lim.MaxChoices)
	}
	for i, p := range r.Prompts {
		if len(p.text) <= len(`""`) && len(p.IDs) == 0 {
			return Invalid("prompt", "prompt %d is empty", i)
		}
		if lim.ContextLen > 0 && len(p.IDs) >= lim.ContextLen {
			return Invalid("prompt", "prompt %d has %d tokens; this model's context of %d leaves no room for an answer",
				i, len(p.IDs), lim.ContextLen)
		}
		if e := CheckVocab("prompt", p.IDs, lim.VocabSize); e != nil {
			return e
		}
	}
	if e := CheckVocab("prompt_token_ids", r.PromptTokenIDs, lim.VocabSize); e != nil {
		return e
	}
	return CheckVocab("output_token_ids", r.OutputTokenIDs, lim.VocabSize)
}

// CheckVocab refuses token ids outside the vocabulary. 0: it is not known.
func CheckVocab(param string, ids []int32, vocab int) *Error {
	if vocab <= 0 {
		return nil
	}
	for i, id := range ids {
		if int(id) >= vocab {
			return Invalid(param, "%s[%d] is %d; this model's vocabulary has %d tokens", param, i, id, vocab)
		}
	}
	return nil
}
