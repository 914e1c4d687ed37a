package load

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"meridian.internal/e2e/client"
)

// Chats are conversations whose turns take turns: between two turns of one, others speak.
type Chats struct {
	URL           string
	Model         string
	Conversations int
	Turns         int // of each
	Concurrency   int // turns at a time
	Words         int // that a user says in a turn
	Output        Dist
	Seed          uint64
	Timeout       time.Duration // of one turn; 0: none
}

// conversation is what was said so far. One turn of it runs at a time.
type conversation struct {
	r        *rand.Rand
	messages []map[string]string
	tokens   int // of the last turn's prompt and answer: what the next one begins with
	turns    int
}

// Chat sends conversations and returns the summary; a conversation ends early when a turn fails. When ctx ends, running turns are
// cancelled and the summary covers what had begun.
func Chat(ctx context.Context, p Chats) (Summary, error) {
	if p.Conversations < 1 || p.Turns < 1 || p.Concurrency < 1 || p.Words < 1 {
		return Summary{}, fmt.Errorf("%d conversations of %d turns of %d words, %d at a time: want at least 1 of each", p.Conversations, p.Turns, p.Words, p.Concurrency)
	}
	c := client.New(p.URL, p.Concurrency)
	defer c.Close()
	t := newTally(time.Now())
	waiting := make(chan *conversation, p.Conversations)
	var left sync.WaitGroup
	for i := range p.Conversations {
		left.Add(1)
		waiting <- &conversation{r: rand.New(rand.NewPCG(p.Seed, uint64(i)))}
	}
	var workers sync.WaitGroup
	for range p.Concurrency {
		workers.Go(func() {
			for v := range waiting {
				if ctx.Err() == nil && v.turn(ctx, c, p, t) && v.turns < p.Turns {
					waiting <- v // has room for all
				} else {
					left.Done()
				}
			}
		})
	}
	left.Wait()
	close(waiting)
	workers.Wait()
	return t.summary(time.Now()), nil
}

// turn says something and takes the answer in; false if there was none.
func (v *conversation) turn(ctx context.Context, c *client.Client, p Chats, t *tally) bool {
	said := make([]string, p.Words)
	for i := range said {
		said[i] = words[v.r.IntN(len(words))]
	}
	v.messages = append(v.messages, map[string]string{"role": "user", "content": strings.Join(said, " ") + "."})
	r := client.Request{Chat: true, Fields: map[string]any{
		"model": p.Model, "messages": v.messages, "max_tokens": p.Output.Draw(v.r), "temperature": 0, "stream": true,
		"stream_options": map[string]any{"include_usage": true}, "ignore_eos": true,
	}}
	t.begin()
	res, err := one(ctx, c, p.Timeout, r)
	t.end(res, err, v.tokens)
	if err != nil || res.Usage == nil {
		return false
	}
	v.turns++
	v.tokens = res.Usage.PromptTokens + res.Usage.CompletionTokens
	v.messages = append(v.messages, map[string]string{"role": "assistant", "content": res.Text})
	return true
}

// words are such that a small model's tokenizer knows them.
var words = strings.Fields("the a one little big red blue old new dog cat bird tree house boy girl mother day night sun moon water ball box " +
	"ran saw said went came looked played found made took gave told and but so then when with from into over under very happy sad")
