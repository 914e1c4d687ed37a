package api

import (
	"encoding/json"
	"slices"

	"meridian.internal/shared/infer"
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
	maxLogitBias      = 4096
	maxTopLogprobs    = 20
	maxUserLen        = 4096
	maxNameLen        = 512
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

	// Control fields: set by a router, never by its clients.
	Disagg         *DisaggParams
	PromptTokenIDs []int32
	OutputTokenIDs []int32

	noTools bool // tool_choice is "none"

	Body   []byte  // as received
	Fields []Field // members of Body, in order; alias Body
}

// ControlFields are the names that only a router may set. A router drops them from what clients send.
func ControlFields() []string {
	return []string{
		"disaggregated_params", "prompt_token_ids", "prompt_token_ids_b64", "output_token_ids", "return_prompt_token_ids_b64",
		"kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "ec_transfer_params",
	}
}

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
			return 0, Invalid("max_tokens", "the prompt has %d tokens and max_tokens is %d; together they exceed this model's context of %d tokens",
				promptTokens, *r.MaxTokens, contextLen)
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

// Set is a member that AppendBody writes in place of, or after, the client's. A nil Value removes it.
type Set struct {
	Key   string
	Value []byte // JSON
}

// AppendBody appends the client's body with the members of set replaced or added; control fields of the client are
// dropped. All other members are copied as sent: numbers keep their digits, unknown fields their bytes.
func (r *Request) AppendBody(dst []byte, set []Set) []byte {
	return AppendPatched(dst, r.Fields, set, true)
}

// AppendOpen is AppendBody without the closing brace: two legs share what they have in common, and each sends its own
// tail after it.
func (r *Request) AppendOpen(dst []byte, set []Set) []byte {
	dst = slices.Grow(dst, len(r.Body)+256)
	return appendOpen(dst, r.Fields, set, true)
}

// AppendTail appends ,"key":value for each member of set, and the closing brace.
func AppendTail(dst []byte, set []Set) []byte {
	for _, s := range set {
		if s.Value != nil {
			dst = append(dst, ',')
			dst = append(append(AppendString(dst, s.Key), ':'), s.Value...)
		}
	}
	return append(dst, '}')
}

// AppendPatched appends an object made of fields, with the members of set replaced or added; dropControl drops control
// fields that set does not name.
func AppendPatched(dst []byte, fields []Field, set []Set, dropControl bool) []byte {
	return append(appendOpen(dst, fields, set, dropControl), '}')
}

func appendOpen(dst []byte, fields []Field, set []Set, dropControl bool) []byte {
	dst = append(dst, '{')
	start := len(dst)
	comma := func() {
		if len(dst) > start {
			dst = append(dst, ',')
		}
	}
	for _, f := range fields {
		if named(set, f.Key) || (dropControl && isControl(f.Key)) {
			continue
		}
		comma()
		dst = append(append(AppendString(dst, string(f.Key)), ':'), f.Value...)
	}
	for _, s := range set {
		if s.Value == nil {
			continue
		}
		comma()
		dst = append(append(AppendString(dst, s.Key), ':'), s.Value...)
	}
	return dst
}

func named(set []Set, key []byte) bool {
	for _, s := range set {
		if s.Key == string(key) {
			return true
		}
	}
	return false
}
