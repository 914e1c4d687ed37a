package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"meridian.internal/router/pool"
	"meridian.internal/router/upstream"
	"meridian.internal/shared/api"
	"meridian.internal/shared/token"
)

const (
	maxTokenizer   = 64 << 20
	tokenizerTime  = 10 * time.Second
	tokenizerRetry = time.Second // after a failure nobody asks again for so long
)

// Tokenizer turns text into the ids that the nodes of one checkpoint use.
type Tokenizer struct {
	Hash       string
	ContextLen int
	Vocab      int
	Encode     func(text string) []int32
	// Chat renders the template and encodes it; nil: the model has no template that this router can render.
	Chat func(ctx context.Context, r *api.Request) ([]int32, error)
}

// chat returns nil ids when nodes have to render.
func (t *Tokenizer) chat(ctx context.Context, r *api.Request) ([]int32, *api.Error) {
	if t.Chat == nil {
		return nil, nil
	}
	if e := r.CheckTurns(t.ContextLen); e != nil {
		return nil, e
	}
	ids, err := t.Chat(ctx, r)
	if err != nil {
		return nil, api.Invalid("messages", "messages do not fit the chat template: %v", err)
	}
	return ids, nil
}

// check refuses what no node could run.
func (t *Tokenizer) check(r *api.Request, ids []int32) *api.Error {
	if e := api.CheckVocab("prompt", ids, t.Vocab); e != nil {
		return e
	}
	if e := r.CheckIDs(t.Vocab); e != nil || ids == nil {
		return e
	}
	_, e := r.Budget(len(ids), t.ContextLen)
	return e
}

// Tokenizers fetches tokenizers from nodes, by model hash, and keeps them. Safe for concurrent use.
type Tokenizers struct {
	Pool   *pool.Pool
	Client *upstream.Client
	// Build makes a tokenizer of a node's answer.
	Build func(TokenizerFile) (*Tokenizer, error)

	mu     sync.Mutex // guards byHash; not held while fetching
	byHash map[string]*slot
}

// slot is one tokenizer, fetched by one goroutine at a time.
type slot struct {
	mu     sync.Mutex // held while fetching
	tok    *Tokenizer
	err    error
	failed time.Time
}

// TokenizerFile is the body of a node's GET /tokenizer.
type TokenizerFile struct {
	Model        string          `json:"model"`
	Hash         string          `json:"hash"`
	ContextLen   int             `json:"context_len"`
	Vocab        int             `json:"vocab"`
	Tokenizer    json.RawMessage `json:"tokenizer"`
	Config       json.RawMessage `json:"tokenizer_config"`
	ChatTemplate *string         `json:"chat_template"`
}

// For returns the tokenizer of a model; nil when no node of ours serves it.
func (t *Tokenizers) For(ctx context.Context, model string) (*Tokenizer, error) {
	hash, url := t.Pool.Source(model)
	if hash == "" {
		return nil, nil
	}
	t.mu.Lock()
	if t.byHash == nil {
		t.byHash = map[string]*slot{}
	}
	s := t.byHash[hash]
	if s == nil {
		s = &slot{}
		t.byHash[hash] = s
	}
	t.mu.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.tok != nil || (s.err != nil && time.Since(s.failed) < tokenizerRetry) {
		return s.tok, s.err
	}
	tok, err := t.fetch(ctx, url, hash)
	if err != nil && ctx.Err() != nil {
		return nil, err // the client left, which says nothing to others
	}
	s.tok, s.err, s.failed = tok, err, time.Now()
	return tok, err
}

// warmEvery is how often Run looks for models that no request has asked for yet.
const warmEvery = 250 * time.Millisecond

// Run fetches the tokenizers of the members until ctx ends, so that no request waits for one.
func (t *Tokenizers) Run(ctx context.Context) error {
	tick := time.NewTicker(warmEvery)
	defer tick.Stop()
	for {
		for _, m := range t.Pool.Models() {
			_, _ = t.For(ctx, m.Name) // a request that needs it tells the error
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (t *Tokenizers) fetch(ctx context.Context, url, hash string) (*Tokenizer, error) {
	ctx, cancel := context.WithTimeout(ctx, tokenizerTime)
	defer cancel()
	res, err := t.Client.Do(ctx, &upstream.Request{Method: "GET", URL: url, Path: "/tokenizer"})
	if err != nil {
		return nil, err
	}
	defer res.Close()
	body, err := io.ReadAll(io.LimitReader(res, maxTokenizer+1))
	if err != nil {
		return nil, fmt.Errorf("read tokenizer of %s: %w", url, err)
	}
	if res.Status != 200 || len(body) > maxTokenizer {
		return nil, fmt.Errorf("tokenizer of %s: status %d, %d bytes", url, res.Status, len(body))
	}
	var f TokenizerFile
	if err := json.Unmarshal(body, &f); err != nil {
		return nil, fmt.Errorf("tokenizer of %s: %w", url, err)
	}
	if f.Hash != hash {
		return nil, fmt.Errorf("tokenizer of %s: hash %q, the registration says %q", url, f.Hash, hash)
	}
	return t.Build(f)
}

// BuildTokenizer makes a tokenizer with shared/token.
func BuildTokenizer(f TokenizerFile) (*Tokenizer, error) {
	tok, err := token.Parse(f.Tokenizer)
	if err != nil {
		return nil, fmt.Errorf("tokenizer of model %s: %w", f.Model, err)
	}
	t := &Tokenizer{
		Hash: f.Hash, ContextLen: f.ContextLen, Vocab: f.Vocab,
		Encode: func(text string) []int32 { return tok.Encode(text, true) },
	}
	tpl, err := chatTemplate(f)
	if err != nil {
		return nil, fmt.Errorf("chat template of model %s: %w", f.Model, err)
	}
	if tpl == nil {
		return t, nil
	}
	t.Chat = func(ctx context.Context, r *api.Request) ([]int32, error) {
		text, err := tpl.Render(ctx, r.Messages, token.RenderOptions{
			Tools: r.Tools, AddGenerationPrompt: true, Args: r.TemplateArgs, Now: time.Now(),
		})
		if err != nil {
			return nil, err
		}
		return tok.Encode(text, false), nil // the template writes the special tokens
	}
	return t, nil
}

// chatTemplate is nil for a model without one: nodes refuse chat then.
func chatTemplate(f TokenizerFile) (*token.Template, error) {
	c := new(token.Config)
	if len(f.Config) > 0 && string(f.Config) != "null" {
		var err error
		if c, err = token.ParseConfig(f.Config); err != nil {
			return nil, err
		}
	}
	if f.ChatTemplate != nil { // a file of its own wins
		if c.ChatTemplates == nil {
			c.ChatTemplates = map[string]string{}
		}
		c.ChatTemplates[token.DefaultTemplate] = *f.ChatTemplate
	}
	if len(c.ChatTemplates) == 0 {
		return nil, nil
	}
	return token.NewTemplate(c)
}
