package worker

import (
	"context"
	"fmt"
	"time"

	"meridian.internal/shared/api"
	"meridian.internal/shared/token"
)

// chatOf makes the rendering of a model's chat template; nil if the model has none.
func chatOf(m Model) (func(ctx context.Context, r *api.Request) (string, error), error) {
	if m.ConfigJSON == nil && m.ChatTemplate == nil {
		return nil, nil
	}
	c := new(token.Config)
	if m.ConfigJSON != nil {
		var err error
		if c, err = token.ParseConfig(m.ConfigJSON); err != nil {
			return nil, fmt.Errorf("tokenizer_config.json of %s: %w", m.Name, err)
		}
	}
	if m.ChatTemplate != nil { // newer checkpoints keep it in a file of its own, which wins
		if c.ChatTemplates == nil {
			c.ChatTemplates = map[string]string{}
		}
		c.ChatTemplates[token.DefaultTemplate] = string(m.ChatTemplate)
	}
	if len(c.ChatTemplates) == 0 {
		return nil, nil
	}
	t, err := token.NewTemplate(c)
	if err != nil {
		return nil, fmt.Errorf("chat template of %s: %w", m.Name, err)
	}
	return func(ctx context.Context, r *api.Request) (string, error) {
		return t.Render(ctx, r.Messages, token.RenderOptions{
			Tools: r.Tools, AddGenerationPrompt: true, Args: r.TemplateArgs, Now: time.Now(),
		})
	}, nil
}
