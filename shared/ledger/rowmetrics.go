package ledger

import (
	"maps"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/rows"
)

const (
	prefix  = "meridian_"
	gauge   = prometheus.GaugeValue
	counter = prometheus.CounterValue
)

// rowMetric is a series that rows give. What belongs to a rank has the label dp_rank.
type rowMetric struct {
	name, help string
	kind       prometheus.ValueType
	rank       bool
	at         func(*state) rows.Ratio
}

func count(v int64) rows.Ratio { return rows.Ratio{V: float64(v), OK: true} }

func known(v rows.Int) rows.Ratio { return rows.Ratio{V: float64(v.V), OK: v.OK} }

func ofKV(f func(*rows.KV) int64) func(*state) rows.Ratio {
	return func(s *state) rows.Ratio { return rows.Ratio{V: float64(f(&s.kv)), OK: s.kv.Sampled} }
}

// rowMetrics are the names of TensorRT-LLM's worker with our prefix, then counts that it does not have.
func rowMetrics() []rowMetric {
	return append(append(queueMetrics(), kvMetrics()...), batchGauges()...)
}

func queueMetrics() []rowMetric {
	return []rowMetric{
		{"num_requests_running", "Requests that hold a slot.", gauge, false, func(s *state) rows.Ratio { return count(s.last.Requests.Active) }},
		{"num_requests_waiting", "Requests in the queue.", gauge, false, func(s *state) rows.Ratio { return count(s.last.Requests.Queued) }},
		{"max_num_active_requests", "Requests that can hold a slot.", gauge, false, func(s *state) rows.Ratio { return count(s.last.Requests.MaxActive) }},
		{"num_requests_new_total", "Requests that the engine accepted.", counter, false, func(s *state) rows.Ratio { return count(s.requests.New) }},
		{"num_requests_completed_total", "Requests that ran to their end.", counter, false, func(s *state) rows.Ratio { return count(s.requests.Completed) }},
		{"num_requests_cancelled_total", "Requests that were cancelled.", counter, false, func(s *state) rows.Ratio { return count(s.requests.Cancelled) }},
		{"num_requests_expired_total", "Requests whose time was over.", counter, false, func(s *state) rows.Ratio { return count(s.requests.Expired) }},
		{"num_requests_failed_total", "Requests that failed in the engine.", counter, false, func(s *state) rows.Ratio { return count(s.requests.Failed) }},
		{"num_requests_preempted_total", "Preemptions.", counter, true, func(s *state) rows.Ratio { return count(s.requests.Suspended) }},
		{"iter_prompt_tokens_total", "Prompt tokens of the requests that got a slot.", counter, false, func(s *state) rows.Ratio { return count(s.sums.Prompt) }},
		{"iter_cached_tokens_total", "Those of them whose KV was here already.", counter, false, func(s *state) rows.Ratio { return count(s.sums.Cached) }},
		{"iter_context_tokens_total", "Tokens that prefill computed, again after preemptions included.", counter, true, func(s *state) rows.Ratio { return count(s.sums.Context) }},
		{"iter_output_tokens_total", "Tokens sampled and given out.", counter, true, func(s *state) rows.Ratio { return count(s.sums.Output) }},
		{"iter_probe_blocks_total", "New KV blocks that probes took, in alloc_new_blocks too.", counter, true, func(s *state) rows.Ratio { return count(s.sums.ProbeBlocks) }},
		{"iteration_latency_seconds", "iterLatencyMS of the newest row: with overlap about two loops.", gauge, false, func(s *state) rows.Ratio {
			return rows.Ratio{V: float64(s.last.IterLatency.NS) / 1e9, OK: s.last.IterLatency.OK}
		}},
		{"gpu_memory_usage_bytes", "Used memory of the device, by all processes.", gauge, false, func(s *state) rows.Ratio { return known(s.last.Memory.GPU) }},
		{"cpu_memory_usage_bytes", "Memory of the process.", gauge, false, func(s *state) rows.Ratio { return known(s.last.Memory.CPU) }},
		{"pinned_memory_usage_bytes", "Memory of the process that is locked or pinned.", gauge, false, func(s *state) rows.Ratio { return known(s.last.Memory.Pinned) }},
	}
}

func kvMetrics() []rowMetric {
	return []rowMetric{
		{"kv_cache_hit_rate", "Reused of reused and missed KV blocks, since the start.", gauge, true, func(s *state) rows.Ratio { return s.kv.HitRate }},
		{"kv_cache_utilization", "Share of KV blocks that requests and transfers hold.", gauge, true, func(s *state) rows.Ratio { return rows.RatioOf(s.kv.Used, s.kv.Max) }},
		{"kv_cache_max_blocks", "KV blocks in all.", gauge, true, ofKV(func(k *rows.KV) int64 { return k.Max })},
		{"kv_cache_free_blocks", "KV blocks that can be handed out, reusable ones included.", gauge, true, ofKV(func(k *rows.KV) int64 { return k.Free })},
		{"kv_cache_used_blocks", "KV blocks held.", gauge, true, ofKV(func(k *rows.KV) int64 { return k.Used })},
		{"kv_cache_reused_blocks_total", "KV blocks that were found by their tokens.", counter, true, func(s *state) rows.Ratio { return count(s.reused.Total) }},
		{"kv_cache_missed_blocks_total", "Full KV blocks that were looked for and not found.", counter, true, func(s *state) rows.Ratio { return count(s.missed.Total) }},
		{"kv_cache_iter_reuse_rate", "Reused of reused and missed blocks in the newest row with any.", gauge, true, func(s *state) rows.Ratio { return s.reuse }},
		{"kv_cache_iter_reused_blocks_total", "Reused blocks, summed over rows.", counter, true, func(s *state) rows.Ratio { return count(s.full + s.partial) }},
		{"kv_cache_iter_full_reused_blocks_total", "Blocks reused as a whole.", counter, true, func(s *state) rows.Ratio { return count(s.full) }},
		{"kv_cache_iter_partial_reused_blocks_total", "Blocks reused in part.", counter, true, func(s *state) rows.Ratio { return count(s.partial) }},
		{"kv_cache_iter_missed_blocks_total", "Missed blocks, summed over rows.", counter, true, func(s *state) rows.Ratio { return count(s.iterMissed) }},
		{"kv_cache_host_utilization", "Share of the host tier's KV blocks that hold something; without a host tier there is no series.", gauge, true, func(s *state) rows.Ratio {
			return rows.RatioOf(s.kv.SecondaryUsed.V, s.kv.SecondaryMax.V)
		}},
		{"kv_cache_onboard_bytes_total", "KV copied from the host tier to the device.", counter, true, func(s *state) rows.Ratio { return count(s.onboarded) }},
		{"kv_cache_offload_bytes_total", "KV copied from the device to the host tier.", counter, true, func(s *state) rows.Ratio { return count(s.offloaded) }},
		{"kv_cache_intra_device_copy_bytes_total", "KV copied inside the device, for prompts that share a part of a block.", counter, true, func(s *state) rows.Ratio { return count(s.copied) }},
		{"kv_cache_host_dropped_blocks_total", "Contents that the host tier gave up for others: it is too small for what is reused.", counter, true, func(s *state) rows.Ratio { return tiered(s.hostDropped, s.kv.SecondaryMax) }},
		{"kv_cache_disk_utilization", "Share of the disk tier's KV blocks that hold something; without a disk tier there is no series.", gauge, true, func(s *state) rows.Ratio {
			return rows.RatioOf(s.kv.DiskUsed.V, s.kv.DiskMax.V)
		}},
		{"kv_cache_disk_prefetch_blocks_total", "KV blocks copied from the disk tier to the device.", counter, true, func(s *state) rows.Ratio { return tiered(s.diskLoaded, s.kv.DiskMax) }},
		{"kv_cache_disk_stored_blocks_total", "KV blocks copied from the device to the disk tier.", counter, true, func(s *state) rows.Ratio { return tiered(s.diskStored, s.kv.DiskMax) }},
		{"kv_cache_disk_dropped_blocks_total", "Contents that the disk tier gave up for others.", counter, true, func(s *state) rows.Ratio { return tiered(s.diskDropped, s.kv.DiskMax) }},
		{"kv_cache_disk_broken_blocks_total", "Blocks of the disk tier that could not be read back and were computed.", counter, true, func(s *state) rows.Ratio { return tiered(s.diskBroken, s.kv.DiskMax) }},
		{"kv_cache_gen_alloc_blocks_total", "Blocks that decoding sequences took.", counter, true, func(s *state) rows.Ratio { return count(s.genBlocks) }},
		{"kv_cache_alloc_new_blocks_total", "Blocks handed out empty.", counter, true, ofKV(func(k *rows.KV) int64 { return k.AllocNew })},
		{"kv_cache_freed_blocks_total", "Blocks that became free; with evictable ones they equal those handed out once nothing runs.", counter, true, ofKV(func(k *rows.KV) int64 { return k.Freed })},
		{"kv_cache_evictable_blocks", "Blocks that nobody holds and that can be reused.", gauge, true, ofKV(func(k *rows.KV) int64 { return k.Evictable })},
	}
}

// levelMetrics are the cached prompt tokens by the tier that had them.
func levelMetrics() []levelMetric {
	out := []levelMetric{{level: "0", tier: "device"}, {level: "1", tier: "host"}, {level: "2", tier: "disk"}}
	for i, at := range []func(*state) rows.Ratio{
		func(s *state) rows.Ratio { return count(s.sums.CachedDevice) },
		func(s *state) rows.Ratio { return known(s.sums.CachedHost) },
		func(s *state) rows.Ratio { return known(s.sums.CachedDisk) },
	} {
		out[i].rowMetric = rowMetric{"prompt_cache_hit_tokens_total", "Prompt tokens whose KV was here already, by the tier of memory that had it.", counter, true, at}
	}
	return out
}

type levelMetric struct {
	rowMetric
	level, tier string
}

// tiered is a count of a tier, unknown where the node does not have it.
func tiered(n int64, blocks rows.Int) rows.Ratio { return rows.Ratio{V: float64(n), OK: blocks.OK} }

func batchGauges() []rowMetric {
	return []rowMetric{
		{"num_context_requests", "Requests in prefill in the newest sampled batch.", gauge, true, func(s *state) rows.Ratio { return known(s.last.Batch.Context) }},
		{"num_generation_requests", "Decoding requests in the newest sampled batch.", gauge, true, func(s *state) rows.Ratio { return known(s.last.Batch.Gen) }},
		{"num_paused_requests", "Preempted requests.", gauge, true, func(s *state) rows.Ratio { return known(s.last.Batch.Paused) }},
		{"num_scheduled_requests", "Requests in the newest sampled batch.", gauge, true, func(s *state) rows.Ratio { return known(s.last.Batch.Scheduled) }},
		{"total_context_tokens", "Tokens of prefill in the newest sampled batch.", gauge, true, func(s *state) rows.Ratio { return known(s.last.Batch.CtxTokens) }},
		{"avg_decoded_tokens_per_iter", "Tokens that a decoding request got in the newest sampled batch.", gauge, true, func(s *state) rows.Ratio { return s.last.Batch.DecodedPerIter }},
		{"prefill_batch_occupancy", "Requests in prefill of those that can hold a slot.", gauge, true, func(s *state) rows.Ratio {
			return rows.Ratio{V: float64(s.last.Batch.Context.V) / float64(max(s.last.Requests.MaxActive, 1)), OK: s.last.Batch.Context.OK}
		}},
	}
}

// rowCollector exports the sums of the rows.
type rowCollector struct {
	l         *Ledger
	metrics   []rowMetric
	descs     [][]*prometheus.Desc // by rank, by metric; of a metric that is no rank's the first
	imbalance []imbalance
	dropped   *prometheus.Desc
}

func newRowCollector(l *Ledger, labels prometheus.Labels) *rowCollector {
	c := &rowCollector{l: l, metrics: rowMetrics(), imbalance: imbalances(labels)}
	c.dropped = prometheus.NewDesc(prefix+"rank_rows_dropped_total", "Rows of ranks that did not become part of a set of all.", nil, labels)
	levels := levelMetrics()
	for _, m := range levels {
		c.metrics = append(c.metrics, m.rowMetric)
	}
	for rank := range l.states {
		ranked := withRank(labels, rank)
		var descs []*prometheus.Desc
		for i, m := range c.metrics {
			constant := labels
			if m.rank {
				constant = ranked
			}
			if at := i - len(c.metrics) + len(levels); at >= 0 {
				constant = maps.Clone(ranked)
				constant["cache_level"], constant["cache_tier"] = levels[at].level, levels[at].tier
			}
			descs = append(descs, prometheus.NewDesc(prefix+m.name, m.help, nil, constant))
		}
		c.descs = append(c.descs, descs)
	}
	return c
}

func withRank(labels prometheus.Labels, rank int) prometheus.Labels {
	out := maps.Clone(labels)
	out["dp_rank"] = strconv.Itoa(rank)
	return out
}

// Describe sends the names.
func (c *rowCollector) Describe(to chan<- *prometheus.Desc) {
	for rank, descs := range c.descs {
		for i, d := range descs {
			if rank == 0 || c.metrics[i].rank {
				to <- d
			}
		}
	}
	for _, m := range c.imbalance {
		to <- m.desc
	}
	to <- c.dropped
}

// Collect sends what is known.
func (c *rowCollector) Collect(to chan<- prometheus.Metric) {
	total, ranks := c.l.snapshot()
	for rank := range ranks {
		for i, m := range c.metrics {
			s := &ranks[rank]
			if !m.rank {
				s = &total
			}
			if v := m.at(s); (rank == 0 || m.rank) && v.OK && (s.seen || m.kind == counter) {
				to <- prometheus.MustNewConstMetric(c.descs[rank][i], m.kind, v.V)
			}
		}
	}
	for _, m := range c.imbalance {
		if v := m.of(ranks); v.OK {
			to <- prometheus.MustNewConstMetric(m.desc, gauge, v.V)
		}
	}
	if len(ranks) > 1 && total.seen {
		to <- prometheus.MustNewConstMetric(c.dropped, counter, float64(total.last.Dropped))
	}
}

// imbalance says how much more the busiest rank had than the mean: 1 is balance, the number of ranks the opposite.
type imbalance struct {
	desc *prometheus.Desc
	at   func(*state) int64
}

func imbalances(labels prometheus.Labels) []imbalance {
	desc := func(of string) *prometheus.Desc {
		l := maps.Clone(labels)
		l["of"] = of
		return prometheus.NewDesc(prefix+"rank_imbalance_ratio", "What the busiest rank had over the mean of all, in the newest rows.", nil, l)
	}
	return []imbalance{
		{desc("batch"), func(s *state) int64 { return s.last.Batch.Scheduled.V }},
		{desc("tokens"), func(s *state) int64 { return s.last.Batch.CtxTokens.V + s.last.Batch.Gen.V }},
		{desc("kv_blocks"), func(s *state) int64 { return s.kv.Used }},
	}
}

// of is unknown where there is one rank, or nothing to balance.
func (m *imbalance) of(ranks []state) rows.Ratio {
	largest, sum := int64(0), int64(0)
	for i := range ranks {
		v := m.at(&ranks[i])
		largest, sum = max(largest, v), sum+v
	}
	if len(ranks) == 1 {
		return rows.Ratio{}
	}
	return rows.RatioOf(largest*int64(len(ranks)), sum)
}

// infoMetrics are the configuration, as gauges and as labels of a series that is 1.
func infoMetrics(labels prometheus.Labels, e *Engine) []prometheus.Collector {
	var out []prometheus.Collector
	fixed := func(name, help string, v float64, labels prometheus.Labels) {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: prefix + name, Help: help, ConstLabels: labels})
		g.Set(v)
		out = append(out, g)
	}
	with := func(pairs ...string) prometheus.Labels {
		l := maps.Clone(labels)
		for i := 0; i < len(pairs); i += 2 {
			l[pairs[i]] = pairs[i+1]
		}
		return l
	}
	fixed("max_batch_size_static", "Sequences of a batch, as configured.", float64(e.MaxBatchSize), labels)
	fixed("max_batch_size_runtime", "Sequences of a batch, now.", float64(e.MaxBatchSize), labels)
	fixed("max_num_tokens_runtime", "Query tokens of a batch.", float64(e.MaxNumTokens), labels)
	for rank := range max(e.Ranks, 1) {
		fixed("kv_cache_tokens_per_block", "Tokens of a KV block.", float64(e.TokensPerBlock), withRank(labels, rank))
	}
	fixed("model_config_info", "The model; always 1.", 1, with("context_tokens", strconv.FormatInt(e.Window, 10)))
	fixed("parallel_config_info", "How the model is spread over ranks; always 1.", 1, with("tensor_parallel_size", "1", "pipeline_parallel_size", strconv.Itoa(max(e.Stages, 1)),
		"data_parallel_size", strconv.Itoa(max(e.Ranks, 1))))
	fixed("kv_cache_config_info", "The KV cache; always 1.", 1, with("tokens_per_block", strconv.FormatInt(e.TokensPerBlock, 10),
		"max_blocks", strconv.Itoa(e.Blocks), "enable_block_reuse", strconv.FormatBool(e.PrefixReuse), "tier", e.Tier))
	return out
}

// batchMetrics are histograms over sampled batches, by rank.
type batchMetrics struct{ tokens, size []prometheus.Histogram }

func newBatchMetrics(labels prometheus.Labels, ranks int) *batchMetrics {
	m := &batchMetrics{}
	for rank := range ranks {
		h := func(name, help string, buckets []float64) prometheus.Histogram {
			return prometheus.NewHistogram(histogram(name, help, buckets, withRank(labels, rank)))
		}
		m.tokens = append(m.tokens, h("prefill_batch_tokens", "Tokens of prefill in sampled batches that have any.", prometheus.ExponentialBuckets(64, 2, 10)))
		m.size = append(m.size, h("scheduled_batch_size", "Requests in sampled batches.", prometheus.ExponentialBuckets(1, 2, 10)))
	}
	return m
}

func (m *batchMetrics) all() (out []prometheus.Collector) {
	for rank := range m.size {
		out = append(out, m.tokens[rank], m.size[rank])
	}
	return out
}

func (m *batchMetrics) observe(r *rows.Row) {
	if r.Drain || r.Synthetic {
		return
	}
	m.size[r.Rank].Observe(float64(r.Batch.Scheduled.V))
	if r.Batch.CtxTokens.V > 0 {
		m.tokens[r.Rank].Observe(float64(r.Batch.CtxTokens.V))
	}
}
