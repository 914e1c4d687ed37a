package worker

import (
	"encoding/json"
	"strings"
	"unicode/utf8"

	"meridian.internal/shared/api"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/token"
)

// text turns the tokens of one sequence into the text of a choice.
type text struct {
	tok     *token.Tokenizer
	stream  *token.Stream
	stop    *token.Stopper
	decoded int  // characters of text so far, held-back ones included
	logprob bool // wanted

	tokens int    // taken so far, those of earlier attempts not counted
	which  string // stop string that ended it
	ended  bool   // by a stop string
}

// newText makes the state after the tokens that an earlier attempt already gave: their text is not emitted again.
func newText(tok *token.Tokenizer, r *api.Request, given []int32) *text {
	t := &text{tok: tok, stream: tok.NewStream(true), stop: token.NewStopper(r.Stop), logprob: r.Logprobs != nil}
	for _, id := range given {
		t.take(id)
	}
	return t
}

func (t *text) take(id int32) string {
	s := t.stream.Push(id)
	t.decoded += utf8.RuneCountInString(s) // the stream cuts between characters
	emit, ended, which := t.stop.Push(s)
	t.ended, t.which = ended, which
	return emit
}

// piece is what one batch of tokens adds to a choice.
type piece struct {
	text     string
	ids      []int32
	logprobs []api.TokenLogprob
}

// push takes tokens up to a stop string. silent is the token whose text is not shown: the EOS or stop token.
func (t *text) push(tokens []infer.Token, silent *int32) piece {
	p := piece{ids: make([]int32, 0, len(tokens))}
	if t.logprob {
		p.logprobs = []api.TokenLogprob{}
	}
	var b strings.Builder
	for i, k := range tokens {
		at := t.decoded
		if silent == nil || i < len(tokens)-1 || k.ID != *silent {
			b.WriteString(t.take(k.ID))
		}
		p.ids = append(p.ids, k.ID)
		if t.logprob {
			p.logprobs = append(p.logprobs, t.describe(k, at))
		}
		t.tokens++
		if t.ended {
			break
		}
	}
	p.text = b.String()
	return p
}

// end gives the text that was held back.
func (t *text) end() string {
	if t.ended {
		return ""
	}
	emit, ended, which := t.stop.Push(t.stream.Flush())
	t.ended, t.which = ended, which
	if ended {
		return emit
	}
	return emit + t.stop.Flush()
}

func (t *text) describe(k infer.Token, at int) api.TokenLogprob {
	one := func(id int32, lp float32) api.TokenLogprob {
		raw := t.tok.TokenBytes(id)
		return api.TokenLogprob{Text: strings.ToValidUTF8(string(raw), "\uFFFD"), Bytes: raw, Logprob: lp, Offset: at}
	}
	out := one(k.ID, k.Logprob)
	if utf8.Valid(out.Bytes) { // what is left of a broken character came out with it, and is before it
		out.Offset = max(at, t.decoded-utf8.RuneCount(out.Bytes))
	}
	for _, l := range k.Top {
		out.Top = append(out.Top, one(l.Token, l.Logprob))
	}
	return out
}

// reason gives finish_reason and stop_reason of OpenAI's and of vLLM's bodies.
func (t *text) reason(d *infer.Done) (string, json.RawMessage) {
	if t.ended {
		b, _ := json.Marshal(t.which) // a string cannot fail
		return string(infer.FinishStop), b
	}
	return string(d.Reason), nil
}
