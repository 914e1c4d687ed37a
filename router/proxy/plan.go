package proxy

import (
	"context"

	"meridian.internal/shared/api"
	"meridian.internal/shared/jsonline"
)

// plan makes the sub-requests: prompts x n. Prompts are tokenized here when a node of ours has told its tokenizer;
// otherwise the client's text is sent, untouched.
func (s *session) plan(ctx context.Context) *api.Error {
	tok, err := s.tokenizer(ctx)
	if err != nil {
		s.p.o.Logger.Warn("tokenizer is not available; nodes tokenize", "model", s.req.Model, "request_id", s.id, "error", err)
	}
	if tok != nil || err != nil { // nodes of ours serve it
		if e := s.req.CheckPlain(); e != nil {
			return e
		}
	}
	if s.req.Chat {
		var ids []int32
		if tok != nil {
			var e *api.Error
			if ids, e = tok.chat(ctx, s.req); e != nil {
				return e
			}
		}
		return s.addPrompt(0, ids, nil, tok)
	}
	for i, p := range s.req.Prompts {
		ids := p.IDs
		var raw []byte
		switch {
		case ids != nil && (tok != nil || len(s.req.Prompts) > 1):
			raw = api.AppendIDs(nil, ids)
		case tok != nil:
			ids = tok.Encode(p.Text())
			raw = api.AppendIDs(nil, ids)
		case ids == nil && len(s.req.Prompts) > 1:
			raw = jsonline.AppendString(nil, p.Text())
		}
		if e := s.addPrompt(i, ids, raw, tok); e != nil {
			return e
		}
	}
	return nil
}

func (s *session) tokenizer(ctx context.Context) (*Tokenizer, error) {
	if s.p.o.Tokenizers == nil {
		return nil, nil
	}
	return s.p.o.Tokenizers.For(ctx, s.req.Model)
}

func (s *session) addPrompt(i int, ids []int32, raw []byte, tok *Tokenizer) *api.Error {
	if tok != nil {
		if e := tok.check(s.req, ids); e != nil {
			return e
		}
	}
	for j := range s.req.N {
		b := &s.sub0
		if len(s.subs) == 0 {
			s.subs = s.subs0[:0]
		} else {
			b = new(sub)
		}
		b.s, b.index, b.first, b.ids, b.prompt = s, i*s.req.N+j, j == 0, ids, raw
		s.subs = append(s.subs, b)
	}
	return nil
}
