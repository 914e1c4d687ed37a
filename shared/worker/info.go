package worker

import (
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/infer"
)

// Tokenizer is the body of GET /tokenizer: all that a router needs to tokenize for the model with this hash.
type Tokenizer struct {
	Model           string          `json:"model"`
	Hash            string          `json:"hash"`
	ContextLen      int             `json:"context_len"`
	Vocab           int             `json:"vocab"`
	EOS             []int32         `json:"eos_token_ids"`
	TokenizerJSON   json.RawMessage `json:"tokenizer"`
	TokenizerConfig json.RawMessage `json:"tokenizer_config"` // null: none
	ChatTemplate    *string         `json:"chat_template"`    // chat_template.jinja; null: in tokenizer_config, if anywhere
}

func tokenizerBody(m Model) ([]byte, error) {
	t := Tokenizer{
		Model: m.Name, Hash: m.Hash, ContextLen: m.ContextLen, Vocab: m.Vocab, EOS: m.EOS,
		TokenizerJSON: json.RawMessage(m.TokenizerJSON), TokenizerConfig: json.RawMessage("null"),
	}
	if m.ConfigJSON != nil {
		t.TokenizerConfig = m.ConfigJSON
	}
	if m.ChatTemplate != nil {
		s := string(m.ChatTemplate)
		t.ChatTemplate = &s
	}
	b, err := json.Marshal(t)
	if err != nil {
		return nil, fmt.Errorf("describe the tokenizer of %s: %w", m.Name, err)
	}
	return b, nil
}

func (n *Node) tokenizer(c echo.Context) error {
	etag := `"` + n.o.Model.Hash + `"`
	c.Response().Header().Set("ETag", etag)
	if c.Request().Header.Get("If-None-Match") == etag {
		return c.NoContent(http.StatusNotModified)
	}
	return c.JSONBlob(http.StatusOK, n.server)
}

func (n *Node) models(c echo.Context) error {
	return c.JSON(http.StatusOK, map[string]any{"object": "list", "data": []any{map[string]any{
		"id": n.o.Model.Name, "object": "model", "created": 0, "owned_by": "meridian",
		"max_model_len": n.o.Model.ContextLen,
	}}})
}

// serverInfo is GET /server_info: TensorRT-LLM's disaggregated_params, then what our own routers and people read.
func (n *Node) serverInfo(c echo.Context) error {
	disagg := map[string]any{}
	if n.o.Context != nil && n.o.KVAddr != "" {
		disagg["ctx_info_endpoint"] = []string{"tcp://" + n.o.KVAddr}
		disagg["ctx_dp_rank"] = 0
	}
	var load infer.Load
	if n.o.Load != nil {
		load = n.o.Load()
	}
	return c.JSON(http.StatusOK, map[string]any{
		"name": n.o.Name, "role": n.o.Role, "version": n.o.Version, "model": n.o.Model.Model, "load": load,
		"clock_id": n.o.Steady.ID(), "disaggregated_params": disagg,
		"tokens_per_block": n.o.Model.TokensPerBlock, "max_batch_size": n.o.Model.MaxBatchSize,
	})
}
