package kvwire

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kv"
	"meridian.internal/shared/infer"
)

// ErrIncompatible is returned when a pair of nodes cannot exchange KV; the text says which property differs.
var ErrIncompatible = errors.New("kvwire: incompatible pair")

// ErrRemote is returned when the other side reported a fault of this one transfer.
var ErrRemote = errors.New("kvwire: refused by the peer")

// Hello is what both sides say of themselves when a connection opens. Model hash, layers, KV heads, head size and RoPE
// must be equal; element type, block size, ranks and stages may differ, the receiver converts. With windows the block size must
// be equal, too: what a window leaves behind ends at a block.
type Hello struct {
	Node           string `json:"node"`
	Clock          string `json:"clock"` // clock id
	ModelHash      string `json:"model_hash"`
	Layers         int    `json:"layers"`
	KVHeads        int    `json:"kv_heads"`
	HeadSize       int    `json:"head_size"`
	RoPE           string `json:"rope"`
	Numerics       string `json:"numerics"` // equal: a hand-over changes no bit of the text
	KVType         string `json:"kv_type"`
	TokensPerBlock int    `json:"tokens_per_block"`
	Ranks          int    `json:"ranks"`
	Stages         int    `json:"stages"`
	Windows        []int  `json:"windows,omitempty"` // of each layer: tokens that it keeps of a prompt, 0: all; absent: all layers keep all
	Shares         string `json:"shares,omitempty"`  // how other processes of the host can read this KV where it lies; empty: not at all
	Nonce          string `json:"nonce,omitempty"`   // of this connection, where the cluster has a secret
	Proof          string `json:"proof,omitempty"`   // hello-ack: that the sender knows it
}

// HelloOf fills a Hello from a back end's description.
func HelloOf(node, clockID string, i backend.Info, ranks int) Hello {
	h := Hello{
		Node: node, Clock: clockID, ModelHash: i.ModelHash, Layers: i.Layers, KVHeads: i.KVHeads, HeadSize: i.HeadSize,
		RoPE: i.RoPE, Numerics: i.Numerics, KVType: i.KVType, TokensPerBlock: i.TokensPerBlock, Ranks: ranks, Stages: max(i.Stages, 1),
	}
	if len(i.Windows) > 0 {
		h.Windows = make([]int, i.Layers)
	}
	for _, w := range i.Windows {
		for _, layer := range w.Layers {
			h.Windows[layer] = w.Tokens
		}
	}
	return h
}

// firstKept is the first token of a prompt that travels of a layer: what its window leaves behind does not.
func (h Hello) firstKept(layer, prompt int) int {
	if h.Windows == nil || h.Windows[layer] == 0 {
		return 0
	}
	return kv.FirstBlock(h.Windows[layer], prompt, h.TokensPerBlock) * h.TokensPerBlock
}

// Compatible says why KV of peer cannot be used here, nil if it can.
func (h Hello) Compatible(peer Hello) error {
	for _, p := range []struct {
		name       string
		here, peer any
	}{
		{"model hash", h.ModelHash, peer.ModelHash}, // first: it explains the others
		{"layers", h.Layers, peer.Layers},
		{"KV heads", h.KVHeads, peer.KVHeads},
		{"head size", h.HeadSize, peer.HeadSize},
		{"RoPE", h.RoPE, peer.RoPE},
	} {
		if p.here != p.peer {
			return fmt.Errorf("%w: %s is %v at %s and %v at %s", ErrIncompatible, p.name, p.here, h.Node, p.peer, peer.Node)
		}
	}
	if !slices.Equal(h.Windows, peer.Windows) {
		return fmt.Errorf("%w: the windows of the layers are %v at %s and %v at %s", ErrIncompatible, h.Windows, h.Node, peer.Windows, peer.Node)
	}
	if h.Windows != nil && h.TokensPerBlock != peer.TokensPerBlock {
		return fmt.Errorf("%w: a block has %d tokens at %s and %d at %s, must be equal for a model with windows", ErrIncompatible, h.TokensPerBlock, h.Node, peer.TokensPerBlock, peer.Node)
	}
	if h.KVType != peer.KVType && (elementCode(h.KVType) == 0 || elementCode(peer.KVType) == 0) {
		return fmt.Errorf("%w: KV type %q at %s and %q at %s; f32, f16 and bf16 can be converted", ErrIncompatible, h.KVType, h.Node, peer.KVType, peer.Node)
	}
	if peer.TokensPerBlock < 1 || peer.TokensPerBlock > 1<<16 || peer.Ranks < 1 || peer.Stages < 1 {
		return fmt.Errorf("%w: %s says %d tokens per block, %d ranks, %d stages", ErrIncompatible, peer.Node, peer.TokensPerBlock, peer.Ranks, peer.Stages)
	}
	return nil
}

// rowBytes is the size of K (or V) of one token in one layer.
func (h Hello) rowBytes() int { return h.KVHeads * h.HeadSize * backend.ElementSize(h.KVType) }

// tokenBytes is the size of one token's KV over the layers of a span.
func (h Hello) tokenBytes(layers int) int { return 2 * layers * h.rowBytes() }

// Want is the payload of a request: the KV of prompt tokens from TokenFrom on, waited for DeadlineMS at most.
type Want struct {
	TokenFrom  int   `json:"token_from"`
	DeadlineMS int64 `json:"deadline_ms"`
	InPlace    bool  `json:"in_place,omitempty"` // the receiver copies out of the sender's blocks: say where, send no KV
}

// Fault is the payload of an error or a refusal.
type Fault struct {
	Message string `json:"message"`
}

// Trailer ends a transfer: what the sender sampled, so that the receiver samples nothing twice.
type Trailer struct {
	First        []FirstToken       `json:"first"`
	FinishReason infer.FinishReason `json:"finish_reason"`
	FinishedHere bool               `json:"finished_here"` // the sequence ended at the first token; there is nothing to decode
	StopToken    *int32             `json:"stop_token,omitempty"`
	PromptTokens int                `json:"prompt_tokens"`
	CachedTokens int                `json:"cached_tokens"`
}

// FirstToken is a token that the sender sampled.
type FirstToken struct {
	ID      int32          `json:"id"`
	Logprob float32        `json:"logprob"`
	Top     []FirstLogprob `json:"top,omitempty"`
}

// FirstLogprob is one of the most likely tokens at that place.
type FirstLogprob struct {
	ID      int32   `json:"id"`
	Logprob float32 `json:"logprob"`
}

// TrailerOf builds a trailer's tokens from an engine's.
func TrailerOf(tokens []infer.Token) []FirstToken {
	out := make([]FirstToken, 0, len(tokens))
	for _, t := range tokens {
		f := FirstToken{ID: t.ID, Logprob: t.Logprob}
		for _, l := range t.Top {
			f.Top = append(f.Top, FirstLogprob{ID: l.Token, Logprob: l.Logprob})
		}
		out = append(out, f)
	}
	return out
}

// Tokens gives the first tokens in the engine's words.
func (t Trailer) Tokens() []infer.Token {
	out := make([]infer.Token, 0, len(t.First))
	for _, f := range t.First {
		k := infer.Token{ID: f.ID, Logprob: f.Logprob}
		for _, l := range f.Top {
			k.Top = append(k.Top, infer.Logprob{Token: l.ID, Logprob: l.Logprob})
		}
		out = append(out, k)
	}
	return out
}

// parseJSON reads a JSON payload.
func parseJSON[T any](t Type, payload []byte) (T, error) {
	var v T
	if err := json.Unmarshal(payload, &v); err != nil {
		return v, fmt.Errorf("%w: payload of type %d: %w", ErrFrame, t, err)
	}
	return v, nil
}
