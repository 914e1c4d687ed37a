package rowcheck

import (
	"fmt"

	"meridian.internal/shared/rows"
)

// compare holds the ledgers of one engine against each other. Sums over rows are only compared when every row from the
// first is there.
func (c *Checker) compare(name string, n *node) {
	whole := n.first == 1 && n.lost == 0
	if whole {
		c.conserved(name, n)
		c.counted(name, n)
	}
	c.recorded(name, n, whole)
	c.chunks(name, n)
}

// conserved: what came has gone, once the engine is idle.
func (c *Checker) conserved(name string, n *node) {
	q := &n.requests
	if !n.idle() {
		return
	}
	if ended := q.Completed + q.Cancelled + q.Expired + q.Failed; ended != q.New {
		c.fault(n.at, "%s is idle, but its rows count %d new requests and %d that ended", name, q.New, ended)
	}
	for i := range n.ranks {
		k := &n.ranks[i].newest.KV
		if !k.Sampled {
			continue
		}
		if k.Used == 0 && k.AllocNew-k.Freed != k.Evictable {
			c.fault(n.at, "%s is idle: %d KV blocks handed out, %d freed, and %d are kept for reuse", name, k.AllocNew, k.Freed, k.Evictable)
		}
		if k.AllocNew != n.ranks[i].alloc {
			c.fault(n.at, "the rows of %s add up to %d new KV blocks, the last one says %d since the start", name, n.ranks[i].alloc, k.AllocNew)
		}
	}
}

// idle tells whether the newest rows of all ranks say that nothing runs.
func (n *node) idle() bool {
	for i := range n.ranks {
		if q := &n.ranks[i].newest.Requests; q.Active+q.Queued > 0 {
			return false
		}
	}
	return true
}

// kv are the newest totals, of all ranks.
func (n *node) kv() (sum rows.KV) {
	for i := range n.ranks {
		k := &n.ranks[i].kv
		sum.AllocNew += k.AllocNew
		sum.Reused += k.Reused
		sum.Missed += k.Missed
	}
	return sum
}

// counted: the counters are the sums of the rows.
func (c *Checker) counted(name string, n *node) {
	q, kv := &n.requests, n.kv()
	for _, p := range []struct {
		counter string
		rows    int64
	}{
		{"meridian_num_requests_new_total", q.New},
		{"meridian_num_requests_completed_total", q.Completed},
		{"meridian_num_requests_cancelled_total", q.Cancelled},
		{"meridian_num_requests_expired_total", q.Expired},
		{"meridian_num_requests_failed_total", q.Failed},
		{"meridian_num_requests_preempted_total", q.Suspended},
		{"meridian_iter_prompt_tokens_total", n.sums.Prompt},
		{"meridian_iter_cached_tokens_total", n.sums.Cached},
		{"meridian_iter_context_tokens_total", n.sums.Context},
		{"meridian_iter_output_tokens_total", n.sums.Output},
		{"meridian_iter_probe_blocks_total", n.sums.ProbeBlocks},
		{"meridian_kv_cache_alloc_new_blocks_total", kv.AllocNew},
		{"meridian_kv_cache_reused_blocks_total", kv.Reused},
		{"meridian_kv_cache_missed_blocks_total", kv.Missed},
	} {
		if v, ok := n.counters[p.counter]; ok && v != float64(p.rows) {
			c.fault(n.countersAt, "%s of %s is %v, its rows add up to %d", p.counter, name, v, p.rows)
		}
	}
}

// recorded: records are requests that the engine ran. There may be fewer of them: a request may have come past the router.
func (c *Checker) recorded(name string, n *node, whole bool) {
	r := &n.records
	if r.n == 0 || !whole || !n.idle() {
		return
	}
	if r.lastIter > n.lastIter {
		c.fault(n.at, "a request of %s ran in iteration %d, the rows end with %d though the engine is idle", name, r.lastIter, n.lastIter)
	}
	more := n.requests.NewActive < r.n
	if more {
		c.fault(n.at, "the timelines hold %d requests that ran on %s, its rows count %d", r.n, name, n.requests.NewActive)
	}
	for rank := range r.ranks {
		if rank < 0 || rank >= int64(len(n.ranks)) {
			c.fault(n.at, "a request ran on rank %d of %s, whose rows are of %d ranks", rank, name, len(n.ranks))
			return
		}
	}
	for rank := range n.ranks {
		if !more {
			c.summed(n, rank, r.of(int64(rank)), name)
		}
	}
}

// summed: the records of a rank's requests add up to what its rows count.
func (c *Checker) summed(n *node, rank int, of *sums, name string) {
	k, all := &n.ranks[rank], n.requests.NewActive == n.records.n
	if len(n.ranks) > 1 {
		name = fmt.Sprintf("%s, rank %d", name, rank)
	}
	for _, p := range []struct {
		what          string
		records, rows int64
		exact         bool
	}{
		{"prompt tokens", of.prompt, k.sums.Prompt, true},
		{"reused prompt tokens", of.cached, k.sums.Cached, true},
		{"new KV blocks", of.alloc, k.alloc - k.sums.ProbeBlocks, true}, // probes have no records
		{"output tokens", of.output, k.sums.Output, false},              // what a stop string or a cancel cut off was sampled too
	} {
		if p.records > p.rows || all && p.exact && p.records != p.rows {
			c.fault(n.at, "the records of %s add up to %d %s, its rows to %d", name, p.records, p.what, p.rows)
		}
	}
}

// chunks: a prefill that a record places in an iteration is in the row of that iteration.
func (c *Checker) chunks(name string, n *node) {
	for at, tokens := range n.records.chunkTokens {
		b, ok := n.batches[at]
		iter := at.iter
		switch size := n.records.chunkSize[at]; {
		case !ok:
		case tokens > b.context:
			c.fault(n.at, "iteration %d of %s computed %d prompt tokens, records say %d", iter, name, b.context, tokens)
		case size != b.size:
			c.fault(n.at, "iteration %d of %s had a batch of %d, a record says %d", iter, name, b.size, size)
		}
	}
}
