package ledger

import (
	"net/http"

	"github.com/labstack/echo/v4"

	"meridian.internal/shared/rows"
)

// KV is what a node keeps of KV now and has counted since its start: the answer of GET /kv_stats. It is computed when
// somebody asks, from the sums that the rows have left.
type KV struct {
	Enabled        bool     `json:"enabled"` // false: the node counts nothing
	TokensPerBlock int64    `json:"tokens_per_block"`
	Ranks          []KVRank `json:"ranks"`
}

// KVRank is one data-parallel rank. Counts are since the start.
type KVRank struct {
	Groups        []KVGroup `json:"groups"` // of layers, each with blocks of its own; null: no row has told of them yet
	Disk          *KVTier   `json:"disk"`   // null: there is none
	PromptTokens  int64     `json:"prompt_tokens"`
	HitTokens     KVHits    `json:"hit_tokens"` // of these, by the tier that had them
	FullBlocks    int64     `json:"full_blocks"`
	PartialBlocks int64     `json:"partial_blocks"`
	MissedBlocks  int64     `json:"missed_blocks"`
	Moved         KVMoved   `json:"moved"`
}

// KVGroup is a pool of blocks on the device and its part of the host memory.
type KVGroup struct {
	Window     *int64 `json:"window_tokens"` // that a query sees; null: everything
	BlockBytes int64  `json:"block_bytes"`
	KVTier
	Host *KVTier `json:"host"` // null: there is none
}

// KVTier is the room of a tier: Used hold something that is needed or can be found, Evictable are those of them that nobody needs now.
type KVTier struct {
	MaxBlocks       int64  `json:"max_blocks"`
	UsedBlocks      int64  `json:"used_blocks"`
	EvictableBlocks *int64 `json:"evictable_blocks"` // null: not counted
}

// KVHits are cached prompt tokens; null: there is no such tier.
type KVHits struct {
	Device int64  `json:"device"`
	Host   *int64 `json:"host"`
	Disk   *int64 `json:"disk"`
}

// KVMoved counts what went between the tiers.
type KVMoved struct {
	CopiedBytes       int64 `json:"copied_bytes"` // inside the device, of parts of blocks
	OnboardBytes      int64 `json:"onboard_bytes"`
	OffloadBytes      int64 `json:"offload_bytes"`
	HostDroppedBlocks int64 `json:"host_dropped_blocks"`
	DiskLoadedBlocks  int64 `json:"disk_loaded_blocks"`
	DiskStoredBlocks  int64 `json:"disk_stored_blocks"`
	DiskDroppedBlocks int64 `json:"disk_dropped_blocks"`
	DiskBrokenBlocks  int64 `json:"disk_broken_blocks"`
}

func (l *Ledger) kvStats(c echo.Context) error { return c.JSON(http.StatusOK, l.kv()) }

func (l *Ledger) kv() KV {
	if l.ring == nil {
		return KV{Ranks: []KVRank{}}
	}
	static := l.ring.Static()
	out := KV{Enabled: true, TokensPerBlock: static.TokensPerBlock, Ranks: []KVRank{}}
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := range l.states {
		s := &l.states[i]
		out.Ranks = append(out.Ranks, KVRank{
			Groups: s.kvGroups(&static), Disk: tierOf(s.kv.DiskMax, s.kv.DiskUsed, rows.Int{}),
			PromptTokens: s.sums.Prompt, HitTokens: KVHits{s.sums.CachedDevice, pointer(s.sums.CachedHost), pointer(s.sums.CachedDisk)},
			FullBlocks: s.full, PartialBlocks: s.partial, MissedBlocks: s.iterMissed,
			Moved: KVMoved{
				CopiedBytes: s.copied, OnboardBytes: s.onboarded, OffloadBytes: s.offloaded, HostDroppedBlocks: s.hostDropped,
				DiskLoadedBlocks: s.diskLoaded, DiskStoredBlocks: s.diskStored, DiskDroppedBlocks: s.diskDropped, DiskBrokenBlocks: s.diskBroken,
			},
		})
	}
	return out
}

// kvGroups are the pools as of the last row that told of them.
func (s *state) kvGroups(static *rows.Static) []KVGroup {
	if !s.kv.Sampled {
		return nil
	}
	groups, shapes := s.groups, static.Groups
	if groups == nil {
		groups = []rows.KV{s.kv}
	}
	if shapes == nil {
		shapes = []rows.Group{{BlockBytes: static.BlockBytes}}
	}
	out := make([]KVGroup, 0, len(groups))
	for i := range groups {
		k := &groups[i]
		out = append(out, KVGroup{
			Window: pointer(shapes[i].Window), BlockBytes: shapes[i].BlockBytes,
			KVTier: KVTier{k.Max, k.Used + k.Evictable, &k.Evictable}, Host: tierOf(k.SecondaryMax, k.SecondaryUsed, k.SecondaryEvictable),
		})
	}
	return out
}

func tierOf(most, used, evictable rows.Int) *KVTier {
	if !most.OK {
		return nil
	}
	return &KVTier{most.V, used.V, pointer(evictable)}
}

func pointer(v rows.Int) *int64 {
	if !v.OK {
		return nil
	}
	return &v.V
}
