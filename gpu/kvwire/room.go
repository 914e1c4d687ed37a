package kvwire

import (
	"context"
	"fmt"
	"sync"

	"golang.org/x/sync/semaphore"
)

// room bounds the KV that finished prefills may hold while they wait for a receiver that has no place yet.
//
// Without it nodes that serve both schedules can wait for each other: places of the generation node are held by requests
// (generation_first) whose prefill waits for blocks here, and the blocks are leased to requests (context_first) that wait
// for such a place. With half of the blocks kept free of leases that wait, the prefill of the former always goes on.
type room struct {
	all   *semaphore.Weighted
	limit int64 // blocks
	block int   // tokens
}

func newRoom(blocks, tokensPerBlock int) *room {
	limit := int64(max(1, blocks/2))
	return &room{all: semaphore.NewWeighted(limit), limit: limit, block: max(1, tokensPerBlock)}
}

// Lease waits until the KV of so many tokens may wait for a receiver. The export that it gives back frees the room when
// it is released; begin makes the export once there is room.
func (s *Server) Lease(ctx context.Context, tokens int, begin func() (Export, error)) (Export, error) {
	// A prompt of more than half of the blocks waits until no other lease is held, and then may have them: not for long, since a
	// prefill may wait for the rest (session.claim).
	blocks := int64((tokens + s.room.block - 1) / s.room.block)
	n := min(blocks, s.room.limit)
	if err := s.room.all.Acquire(ctx, n); err != nil {
		return nil, fmt.Errorf("wait for room for a lease of %d tokens: %w", tokens, err)
	}
	x, err := begin()
	if err != nil {
		s.room.all.Release(n)
		return nil, err
	}
	return &leased{Export: x, most: blocks > n, free: sync.OnceFunc(func() { s.room.all.Release(n) })}, nil
}

// leased is an export that holds room.
type leased struct {
	Export
	most bool // of the blocks: more than leases may hold
	free func()
}

// Release is idempotent.
func (l *leased) Release() {
	l.Export.Release()
	l.free()
}
