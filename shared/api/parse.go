package api

import (
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"unicode/utf8"
)

// ParseRequest reads and validates the body of /v1/completions, or of /v1/chat/completions when chat. What it returns
// aliases body. Duplicate members are refused: two readers could take different ones.
func ParseRequest(body []byte, chat bool, lim Limits) (*Request, *Error) {
	lim = lim.withDefaults()
	if len(body) > lim.MaxBody {
		e := Invalid("", "the body is over the limit of %d bytes", lim.MaxBody) // its reader may have stopped there
		e.Code = http.StatusRequestEntityTooLarge
		return nil, e
	}
	fields, ascii, err := splitObject(make([]Field, 0, 16), body)
	if !ascii && !utf8.Valid(body) {
		return nil, Invalid("", "the body is not valid UTF-8")
	}
	if err != nil {
		return nil, Invalid("", "the body is not a JSON object: %v", err)
	}
	r := &Request{Chat: chat, N: 1, Body: body, Fields: fields, Sampling: defaultSampling()}
	if e := checkDuplicates(fields); e != nil {
		return nil, e
	}
	for _, f := range fields {
		if lim.Client && isControl(f.Key) {
			continue
		}
		if e := r.set(f); e != nil {
			return nil, e
		}
	}
	if r.noTools {
		r.Tools = nil
	}
	if e := r.check(lim); e != nil {
		return nil, e
	}
	if lim.Client && chat {
		if e := checkMedia(r.Messages); e != nil {
			return nil, e
		}
	}
	return r, nil
}

func (l Limits) withDefaults() Limits {
	if l.MaxBody == 0 {
		l.MaxBody = defaultMaxBody
	}
	if l.MaxChoices == 0 {
		l.MaxChoices = defaultMaxChoices
	}
	return l
}

func checkDuplicates(fields []Field) *Error {
	if len(fields) <= fewFields {
		for i, f := range fields {
			for _, g := range fields[:i] {
				if string(f.Key) == string(g.Key) {
					return givenTwice(f.Key)
				}
			}
		}
		return nil
	}
	seen := make(map[string]struct{}, len(fields))
	for _, f := range fields {
		if _, dup := seen[string(f.Key)]; dup {
			return givenTwice(f.Key)
		}
		seen[string(f.Key)] = struct{}{}
	}
	return nil
}

// fewFields are compared with each other faster than by a map.
const fewFields = 24

func givenTwice(key []byte) *Error {
	return Invalid(paramName(key), "%s is given twice", paramName(key))
}

// paramName bounds a key that a client chose before it goes into a message.
func paramName(key []byte) string {
	if len(key) > 64 {
		return string(key[:64])
	}
	return string(key)
}

// set decodes one member. Null is the same as absent. A field that no group knows is left in Fields.
func (r *Request) set(f Field) *Error {
	if isNull(f.Value) {
		return nil
	}
	groups := [...]func(r *Request, key, v []byte) (bool, error){
		(*Request).setBasic, (*Request).setSampling, (*Request).setInput, (*Request).setControl, (*Request).setShape, (*Request).refuse,
	}
	for _, group := range groups {
		known, err := group(r, f.Key, f.Value)
		if err != nil {
			var e *Error
			if errors.As(err, &e) {
				return e
			}
			return Invalid(string(f.Key), "%s must be %v", f.Key, err)
		}
		if known {
			return nil
		}
	}
	return nil
}

func (r *Request) setBasic(key, v []byte) (bool, error) {
	var err error
	switch string(key) {
	case "model":
		r.Model, err = decodeBounded(v, maxNameLen)
	case "stream":
		r.Stream, err = decodeBool(v)
	case "stream_options":
		err = r.setStreamOptions(v)
	case "user":
		r.User, err = decodeBounded(v, maxUserLen)
	case "max_tokens", "max_completion_tokens":
		var n int64
		if n, err = decodeInt(v, 1, math.MaxInt32); err == nil {
			if r.MaxTokens != nil && *r.MaxTokens != int(n) {
				return true, Invalid(string(key), "max_tokens and max_completion_tokens differ")
			}
			r.MaxTokens, r.maxField = ptr(int(n)), string(key)
		}
	case "n":
		var n int64
		n, err = decodeInt(v, 1, maxN)
		r.N = int(n)
	case "priority":
		var n int64
		n, err = decodeInt(v, math.MinInt32, math.MaxInt32)
		r.Priority = int(n)
	case "conversation_id":
		var id string
		if id, err = decodeBounded(v, maxConversationID); r.Conversation == "" {
			r.Conversation = id
		}
	case "conversation_params":
		err = r.setConversation(v)
	case "prompt_cache_retention":
		r.Pin, err = decodeRetention(v)
	case "ignore_eos":
		r.IgnoreEOS, err = decodeBool(v)
	default:
		return false, nil
	}
	return true, err
}

func ptr[T any](v T) *T { return &v }

// splitOnce splits an object that has no member twice; name is that of the field, want says what it should be.
func splitOnce(name string, v []byte, want errorWant) ([]Field, error) {
	fields, err := SplitObject(nil, v)
	if err != nil {
		return nil, want
	}
	if e := checkDuplicates(fields); e != nil {
		return nil, within(name, e)
	}
	return fields, nil
}

// within names a field by the field that it is in.
func within(name string, e *Error) *Error { return Invalid(name+"."+e.Param, "%s.%s", name, e.Message) }

// setConversation reads TensorRT-LLM's spelling, which goes before the other.
func (r *Request) setConversation(v []byte) error {
	fields, err := splitOnce("conversation_params", v, "an object with a conversation_id")
	if err != nil {
		return err
	}
	for _, f := range fields {
		if string(f.Key) == "conversation_id" && !isNull(f.Value) {
			id, err := decodeBounded(f.Value, maxConversationID)
			if err != nil {
				return Invalid("conversation_params.conversation_id", "conversation_params.conversation_id must be %v", err)
			}
			r.Conversation = id
		}
	}
	return nil
}

// decodeRetention reads OpenAI's prompt_cache_retention, of which they have two spellings for the usual one.
func decodeRetention(v []byte) (pin bool, err error) {
	switch string(v) {
	case `"24h"`:
		return true, nil
	case `"in_memory"`, `"in-memory"`:
		return false, nil
	}
	return false, errorWant(`"in_memory" or "24h"`)
}

func (r *Request) setStreamOptions(v []byte) error {
	fields, err := splitOnce("stream_options", v, "an object")
	if err != nil {
		return err
	}
	for _, f := range fields {
		if string(f.Key) == "include_usage" && !isNull(f.Value) {
			if r.IncludeUsage, err = decodeBool(f.Value); err != nil {
				return Invalid("stream_options.include_usage", "stream_options.include_usage must be %v", err)
			}
		}
	}
	return nil
}

// errorWant completes "field X must be ...".
type errorWant string

func (e errorWant) Error() string { return string(e) }

func (r *Request) setInput(key, v []byte) (bool, error) {
	switch key := string(key); {
	case key == "prompt" && !r.Chat:
		return true, r.setPrompt(v)
	case key == "messages" && r.Chat:
		return true, r.setMessages(v)
	case key == "tools" && r.Chat:
		if v[0] != '[' {
			return true, errorWant("an array")
		}
		if string(v) != "[]" {
			r.Tools = v
		}
		return true, nil
	case key == "chat_template_kwargs" && r.Chat:
		if v[0] != '{' {
			return true, errorWant("an object")
		}
		r.TemplateArgs = v
		return true, nil
	}
	return false, nil
}

func (r *Request) setControl(key, v []byte) (bool, error) {
	var err error
	switch string(key) {
	case "disaggregated_params":
		r.Disagg = new(DisaggParams)
		if jerr := json.Unmarshal(v, r.Disagg); jerr != nil {
			return true, wrongType(string(key), jerr)
		}
	case "prompt_token_ids":
		r.PromptTokenIDs, err = decodeIDs(v)
	case "output_token_ids":
		r.OutputTokenIDs, err = decodeIDs(v)
	default:
		return false, nil
	}
	return true, err
}

// refuse names what OpenAI's API has and this one does not, instead of giving an answer that ignores it.
func (r *Request) refuse(key, v []byte) (bool, error) {
	off := string(v) == "false" || string(v) == `""` || string(v) == "[]" || string(v) == "{}"
	switch string(key) {
	case "echo", "suffix", "functions", "function_call", "use_beam_search", "audio", "web_search_options":
		if !off {
			return true, Invalid(string(key), "%s is not supported", key)
		}
	case "best_of":
		n, err := decodeInt(v, 1, maxN)
		if err != nil {
			return true, err
		}
		if n != 1 {
			return true, Invalid("best_of", "best_of is not supported; use n")
		}
	case "prompt":
		return true, Invalid("prompt", "prompt belongs to /v1/completions; chat takes messages")
	case "messages":
		return true, Invalid("messages", "messages belongs to /v1/chat/completions; completions takes a prompt")
	default:
		return false, nil
	}
	return true, nil
}

func decodeBounded(v []byte, limit int) (string, error) {
	s, err := decodeString(v)
	if err != nil {
		return "", err
	}
	if len(s) > limit {
		return "", errorWant("a string of at most " + itoa(limit) + " bytes")
	}
	return s, nil
}
