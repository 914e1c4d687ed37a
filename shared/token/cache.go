package token

import (
	"hash/maphash"
	"strings"
	"sync"
)

const (
	maxCached   = 64   // bytes of a piece that is worth keeping
	shards      = 16   // so that goroutines seldom meet
	shardPieces = 4096 // 65,536 pieces in all, a few MB
)

// cache remembers the ids of pieces seen: text repeats its words. A full shard starts over, which keeps it bounded
// without any bookkeeping on the way.
type cache struct {
	seed   maphash.Seed
	shards [shards]cacheShard
}

type cacheShard struct {
	mu  sync.RWMutex // guards ids
	ids map[string][]int32
}

func newCache() *cache {
	c := &cache{seed: maphash.MakeSeed()}
	for i := range c.shards {
		c.shards[i].ids = map[string][]int32{}
	}
	return c
}

func (c *cache) shard(piece string) *cacheShard {
	return &c.shards[maphash.String(c.seed, piece)%shards]
}

// get returns ids that the caller must not change.
func (c *cache) get(piece string) ([]int32, bool) {
	s := c.shard(piece)
	s.mu.RLock()
	defer s.mu.RUnlock()
	ids, ok := s.ids[piece]
	return ids, ok
}

// put keeps ids, which must not change afterwards.
func (c *cache) put(piece string, ids []int32) {
	s := c.shard(piece)
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.ids) >= shardPieces {
		clear(s.ids)
	}
	// Cloned: the piece is a part of a prompt, which it would keep alive.
	s.ids[strings.Clone(piece)] = ids
}
