package engine

import (
	"context"
	"io"
	"sync"

	"meridian.internal/shared/infer"
)

// Stream carries tokens and the end of a sequence to its consumer. Giving never waits: what can be given is bounded by the
// sequence.
type Stream struct {
	wake chan struct{} // capacity 1

	mu     sync.Mutex // guards the fields below
	tokens []infer.Token
	done   *infer.Done
	over   bool // done was taken
}

// NewStream makes a stream.
func NewStream() Stream { return Stream{wake: make(chan struct{}, 1)} }

// Give hands tokens and the end to the consumer.
func (s *Stream) Give(tokens []infer.Token, done *infer.Done) {
	s.mu.Lock()
	s.tokens = append(s.tokens, tokens...)
	if done != nil {
		s.done = done
	}
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Next waits for tokens and returns all since the last call, which the caller owns. Done comes once, with the last
// tokens; after it Next returns io.EOF. It has one caller at a time.
func (s *Stream) Next(ctx context.Context) ([]infer.Token, *infer.Done, error) {
	for {
		s.mu.Lock()
		tokens, done, over := s.tokens, s.done, s.over
		s.tokens, s.done, s.over = nil, nil, over || done != nil
		s.mu.Unlock()
		switch {
		case over:
			return nil, nil, io.EOF
		case done != nil || len(tokens) > 0:
			return tokens, done, nil
		}
		select {
		case <-s.wake:
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		}
	}
}
