package api

import (
	"bytes"
	"encoding/json"
	"slices"

	"meridian.internal/shared/infer"
	"meridian.internal/shared/jsonline"
)

// Limits bounds what ParseRequest accepts. A zero field means the default.
type Limits struct {
	MaxBody    int // bytes; default 16 MiB
	MaxChoices int // prompts x n; default 256
	ContextLen int // tokens of prompt plus output; 0: unknown, not checked
	VocabSize  int // token ids must be below; 0: unknown, not checked
	// Client: the body comes from a client. Control fields are not read (a router drops them), and content that a worker would
	// have to fetch from an address is refused.
	Client bool
	// KnowsModel tells whether a model is served; nil accepts every name.
	KnowsModel func(name string) bool
}

const (
	defaultMaxBody    = 16 << 20
	defaultMaxChoices = 256
	maxN              = 128
	maxStops          = 64
	maxStopLen        = 4096
	maxStopTokens     = 1024
	maxLogitBias      = 1024
	maxTopLogprobs    = 20
	maxUserLen        = 4096
	maxNameLen        = 512
	maxConversationID = 512
)

// Prompt is one prompt of a completions request: a text or token ids.
type Prompt struct {
	IDs  []int32 // not nil: the client sent ids
	text []byte  // a JSON string, aliases the body
}

// Text is the prompt where it is none of ids. A router whose nodes tokenize never asks.
func (p Prompt) Text() string {
	s, _ := decodeString(p.text) // it is one: setPrompt has looked
	return s
}

// Request is a validated completions or chat request. Fields that it does not name are kept in Fields, and forwarded.
type Request struct {
	Chat     bool
	Model    string
	Prompts  []Prompt        // completions; at least one
	Messages json.RawMessage // chat: an array of objects with a role, bytes as sent
	Turns    int             // how many they are
	Tools    json.RawMessage // chat: nil if absent, empty, or when tool_choice is "none"
	// Needs is the first field that asks for more than text: tools, response_format and their like; "": none. CheckPlain
	// refuses it.
	Needs string
	// TemplateArgs is chat_template_kwargs: further variables for the chat template; nil if absent.
	TemplateArgs json.RawMessage

	MaxTokens    *int // nil: see Budget
	Stream       bool
	IncludeUsage bool // stream_options.include_usage
	N            int  // at least 1
	Stop         []string
	StopTokenIDs []int32
	IgnoreEOS    bool
	Sampling     infer.Sampling
	SeedSet      bool // false: whoever samples mints a seed
	Logprobs     *int // completions: logprobs; chat: top_logprobs when logprobs is true; nil: not asked
	User         string
	Priority     int
	Conversation string // conversation_params.conversation_id, or else conversation_id
	Pin          bool   // prompt_cache_retention is 24h: its KV stays cached before that of others

	// Control fields: set by a router, never by its clients.
	Disagg         *DisaggParams
	PromptTokenIDs []int32
	OutputTokenIDs []int32

	maxField  string // the field that gave MaxTokens; "": none did
	noTools   bool   // tool_choice is "none"
	wantsTool bool   // tool_choice is "required" or names one

	Body   []byte  // as received
	Fields []Field // members of Body, in order; alias Body
}

// isControl tells the names that only a router may set. A router drops them from what clients send.
func isControl(key []byte) bool {
	switch string(key) {
	case "disaggregated_params", "prompt_token_ids", "prompt_token_ids_b64", "output_token_ids",
		"return_prompt_token_ids_b64", "kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "ec_transfer_params":
		return true
	}
	return false
}

// defaultMaxTokens is OpenAI's default of /v1/completions.
const defaultMaxTokens = 16

// CheckTurns refuses a chat of more messages than a context has tokens, before a template is rendered for each of them.
// contextLen 0: unknown, not checked.
func (r *Request) CheckTurns(contextLen int) *Error {
	if contextLen > 0 && r.Turns > contextLen {
		return Invalid("messages", "%d messages; this model's context has %d tokens", r.Turns, contextLen)
	}
	return nil
}

// Budget returns the output tokens that the request may produce after a prompt of so many tokens, Output tokens that
// were already given included; or the 400 that says what does not fit. contextLen 0: unknown, not checked.
func (r *Request) Budget(promptTokens, contextLen int) (int, *Error) {
	param := "prompt"
	if r.Chat {
		param = "messages"
	}
	if promptTokens < 1 {
		return 0, Invalid(param, "%s is empty: at least one token is needed", param)
	}
	if contextLen > 0 && promptTokens >= contextLen {
		return 0, Invalid(param, "%s has %d tokens; this model's context of %d tokens leaves no room for an answer",
			param, promptTokens, contextLen)
	}
	if r.MaxTokens != nil {
		if contextLen > 0 && promptTokens+*r.MaxTokens > contextLen {
			return 0, Invalid(r.maxField, "the prompt has %d tokens and %s is %d; together they exceed this model's context of %d tokens",
				promptTokens, r.maxField, *r.MaxTokens, contextLen)
		}
		return *r.MaxTokens, nil
	}
	rest := contextLen - promptTokens
	if contextLen <= 0 {
		return defaultMaxTokens, nil
	}
	if r.Chat {
		return rest, nil
	}
	return min(defaultMaxTokens, rest), nil
}

// Set is a member that takes the place of the client's, or comes after it. A nil Value removes it.
type Set struct {
	Key   string
	Value []byte // JSON
}

// AppendOpen appends the client's body without its closing brace, in pieces: its members, but for control fields and those of
// set, as they were sent (numbers keep their digits, unknown fields their bytes), then those of set. Two legs share what they
// have in common, and each sends its own tail after it. The pieces alias the body: a long prompt is not copied.
func (r *Request) AppendOpen(dst [][]byte, set []Set) [][]byte {
	dst = slices.Grow(dst, usualPieces)
	first, behind := len(dst), 0 // the member before
	joins := false               // the newest piece ends behind the member before
	for _, f := range r.Fields {
		from, value := behind, offset(r.Body, f.Value)
		behind = value + len(f.Value)
		switch {
		case named(set, f.Key) || isControl(f.Key):
			joins = false
		case bytes.IndexByte(r.Body[from:value], '\\') >= 0: // a key is spelled one way, so that none is hidden from a worker
			joins = false
			dst = append(dst, appendMember(nil, len(dst) == first, string(f.Key), f.Value))
		case joins:
			last := len(dst) - 1
			dst[last] = dst[last][:len(dst[last])+behind-from]
		case from > 0 && len(dst) == first:
			brace, comma := bytes.IndexByte(r.Body, '{'), from+bytes.IndexByte(r.Body[from:], ',')
			dst, joins = append(dst, r.Body[brace:brace+1], r.Body[comma+1:behind]), true
		default:
			dst, joins = append(dst, r.Body[from:behind]), true
		}
	}
	size := 0
	for _, s := range set {
		size += len(s.Key) + len(s.Value) + len(`,"":`)
	}
	own := make([]byte, 0, size)
	for _, s := range set {
		if s.Value != nil {
			own = appendMember(own, len(dst) == first && len(own) == 0, s.Key, s.Value)
		}
	}
	return append(dst, own)
}

// usualPieces is room for a body from which few members are left out.
const usualPieces = 5

// appendMember appends a member behind the brace, or the comma, that it needs.
func appendMember(dst []byte, first bool, key string, value []byte) []byte {
	before := byte(',')
	if first {
		before = '{'
	}
	return append(append(jsonline.AppendString(append(dst, before), key), ':'), value...)
}

// AppendPatched appends an object made of fields, with the members of set replaced or added.
func AppendPatched(dst []byte, fields []Field, set []Set) []byte {
	start := len(dst)
	for _, f := range fields {
		if !named(set, f.Key) {
			dst = appendMember(dst, len(dst) == start, string(f.Key), f.Value)
		}
	}
	for _, s := range set {
		if s.Value != nil {
			dst = appendMember(dst, len(dst) == start, s.Key, s.Value)
		}
	}
	if len(dst) == start {
		dst = append(dst, '{')
	}
	return append(dst, '}')
}

func named(set []Set, key []byte) bool {
	for _, s := range set {
		if s.Key == string(key) {
			return true
		}
	}
	return false
}
