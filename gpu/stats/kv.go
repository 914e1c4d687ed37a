package stats

import (
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/kv"
	"meridian.internal/shared/kvevent"
	"meridian.internal/shared/rows"
)

// kvLedger makes the KV part of rows. Nothing is computed for iterations that have none: totals and peaks are the pools' own.
type kvLedger struct {
	bytes      []int // of a block of each group of layers
	groups     []kvGroup
	pools      []*kv.Pool // of groups, as of the last look
	violations int64
	violated   func(error)
}

// kvGroup is one pool as of the last row that told of it.
type kvGroup struct {
	last    kv.Stats
	decoded int64 // blocks since then that decode took
	copied  int64 // and that were copied inside the device
}

// look gives the pools of the groups that have bytes.
func (l *kvLedger) look(it *engine.Iteration) []*kv.Pool {
	l.pools = l.pools[:0]
	if l.bytes[0] > 0 {
		l.pools = append(l.pools, it.Pool)
	}
	for i := range len(l.bytes) - 1 {
		l.pools = append(l.pools, it.Pool.Group(i+1))
	}
	return l.pools
}

// carry adds the counts of an iteration.
func (l *kvLedger) carry(it *engine.Iteration) {
	groups := l.groups
	for i := range groups {
		groups[i].copied += int64(it.CopiedBlocks)
	}
	if l.bytes[0] > 0 {
		groups[0].decoded += int64(it.DecodeBlocks)
		groups = groups[1:]
	}
	for i, n := range it.WindowDecodeBlocks {
		groups[i].decoded += int64(n)
	}
}

// changed tells whether blocks were handed out, given back or moved since: without a row of it, readers would go on seeing
// blocks in use that are not.
func (l *kvLedger) changed(it *engine.Iteration) bool {
	for i, p := range l.look(it) {
		s, last := p.Stats(), &l.groups[i].last
		if s.Totals != last.Totals || s.Used+s.Leased != last.Used+last.Leased || s.Host.Moved != last.Host.Moved || s.Disk.Moved != last.Disk.Moved {
			return true
		}
	}
	return false
}

// sample fills in the KV of a row: that of each group, if there are several, and the sum.
func (l *kvLedger) sample(it *engine.Iteration, r *rows.Row) {
	sum := rows.KV{Sampled: true}
	var groups []rows.KV // the row's own: whoever it is given to may keep it
	if len(l.groups) > 1 {
		groups = make([]rows.KV, len(l.groups))
	}
	bytes := l.bytes[len(l.bytes)-len(l.groups):]
	for i, p := range l.look(it) {
		k := &sum
		if groups != nil {
			k = &groups[i]
		}
		if err := l.groups[i].sample(k, p, int64(bytes[i])); err != nil {
			if l.violations++; l.violations == 1 && l.violated != nil {
				l.violated(err)
			}
		}
	}
	if groups != nil {
		for i := range groups {
			k := &groups[i]
			sum.AllocTotal += k.AllocTotal
			sum.AllocNew += k.AllocNew
			sum.Reused += k.Reused
			sum.Missed += k.Missed
			sum.Freed += k.Freed
			sum.AddDisk(k)
		}
		sum.Sum(groups)
		sum.HitRate = rows.RatioOf(sum.Reused, sum.Reused+sum.Missed)
	}
	sum.Violations = l.violations
	r.KV, r.Groups = sum, groups
}

// sample writes what a row tells of a pool into k, which is empty; an error if its blocks do not add up.
func (g *kvGroup) sample(k *rows.KV, p *kv.Pool, bytes int64) error {
	s := p.Stats()
	moved := func(blocks int64) (n, size rows.Int) { return rows.Some(blocks), rows.Some(blocks * bytes) }
	d := minus(s.Totals, g.last.Totals)
	all, reused := s.Reused+s.Loaded+s.Partial, d.Reused+d.Loaded+d.Partial
	peaks, host := p.TakePeaks()
	k.Sampled = true // one by one: a literal would be made elsewhere and copied
	k.Max, k.Free, k.Used, k.Evictable = int64(s.Max), int64(s.Free+s.Cached), int64(s.Used+s.Leased), int64(s.Cached)
	k.PeakFree, k.PeakUsed, k.PeakEvictable = int64(peaks.Available), int64(peaks.Used), int64(peaks.Evictable)
	k.AllocTotal, k.AllocNew, k.Reused, k.Missed, k.Freed = s.Allocated+s.Reused, s.Allocated, all, s.Missed, s.Freed
	k.DAllocTotal, k.DAllocNew, k.DReused, k.DFullReused, k.DPartialReused = d.Allocated+d.Reused, d.Allocated, reused, d.Reused+d.Loaded, d.Partial
	k.DMissed, k.DGenAlloc = d.Missed, g.decoded
	k.HitRate, k.DHitRate = rows.RatioOf(all, all+s.Missed), rows.RatioOf(reused, reused+d.Missed)
	k.IntraCopyBlocks, k.IntraCopyBytes = moved(g.copied)
	if h := &s.Host; h.Max > 0 {
		d := between(h.Moved, g.last.Host.Moved)
		k.SecondaryMax, k.SecondaryFree, k.SecondaryUsed = rows.Some(h.Max), rows.Some(h.Max-h.Used), rows.Some(h.Used)
		k.SecondaryEvictable, k.SecondaryPeakFree = rows.Some(h.Evictable), rows.Some(host.Available)
		k.SecondaryPeakUsed, k.SecondaryPeakEvictable = rows.Some(host.Used), rows.Some(host.Evictable)
		k.OnboardBlocks, k.OnboardBytes = moved(d.Loaded)
		k.OffloadBlocks, k.OffloadBytes = moved(d.Stored)
		k.HostDropped, k.HostDroppedBytes = moved(d.Dropped)
	}
	if t := &s.Disk; t.Max > 0 {
		d := between(t.Moved, g.last.Disk.Moved)
		k.DiskMax, k.DiskUsed, k.DiskLoaded, k.DiskStored = rows.Some(t.Max), rows.Some(t.Used), rows.Some(d.Loaded), rows.Some(d.Stored)
		k.DiskDropped, k.DiskBroken = rows.Some(d.Dropped), rows.Some(d.Broken)
	}
	g.last, g.decoded, g.copied = s, 0, 0
	return s.Conserved()
}

// minus is what was counted between two totals.
func minus(a, b kv.Totals) kv.Totals {
	return kv.Totals{
		Allocated: a.Allocated - b.Allocated, Reused: a.Reused - b.Reused, Loaded: a.Loaded - b.Loaded, Partial: a.Partial - b.Partial,
		Missed: a.Missed - b.Missed, Evicted: a.Evicted - b.Evicted, Freed: a.Freed - b.Freed,
	}
}

// between is what a tier moved between two states.
func between(a, b kv.Moved) kv.Moved {
	return kv.Moved{Stored: a.Stored - b.Stored, Loaded: a.Loaded - b.Loaded, Dropped: a.Dropped - b.Dropped, Broken: a.Broken - b.Broken}
}

// loadedTiers fills in the cached tokens that tiers below the device gave, where there are such.
func loadedTiers(s *rows.Sums, it *engine.Iteration) {
	for _, t := range []struct {
		tier kvevent.Tier
		to   *rows.Int
		n    int
	}{{kvevent.Host, &s.CachedHost, it.CachedHost}, {kvevent.Disk, &s.CachedDisk, it.CachedDisk}} {
		if it.Pool != nil && it.Pool.Has(t.tier) {
			*t.to = rows.Some(t.to.V + int64(t.n))
		}
	}
}
