package rows

// field is a key and where its value is: a pointer to an int64, bool, string, Int, Span, Ratio or time; a []field of an
// object; nil for null.
type field struct {
	key string
	at  func(s *Static, r *Row) any
}

// wall is Unix time in ns, in JSON RFC 3339 in UTC.
type wall int64

// object is a nested group: with array and byWindow one of many members, a member for each group of layers.
type object struct {
	members [][]field
	shape   shape
	absent  bool // null
}

type shape int

const (
	plain shape = iota
	array
	byWindow
)

func null(key string) field { return field{key, nil} }

func nulls(keys ...string) []field {
	out := make([]field, len(keys))
	for i, k := range keys {
		out[i] = null(k)
	}
	return out
}

func group(key string, kv bool, fields []field) field {
	return nest(key, object{members: [][]field{fields}}, func(_ *Static, r *Row) bool { return !kv || r.KV.Sampled })
}

// perGroup is a nested group with a member for each group of layers.
func perGroup(key string, sh shape, n int, of func(i int) []field) field {
	o := object{shape: sh}
	for i := range n {
		o.members = append(o.members, of(i))
	}
	return nest(key, o, func(_ *Static, r *Row) bool { return r.KV.Sampled })
}

func nest(key string, o object, there func(*Static, *Row) bool) field {
	present, absent := &o, &object{o.members, o.shape, true} // made once: a row is written without allocations
	return field{key, func(s *Static, r *Row) any {
		if there(s, r) {
			return present
		}
		return absent
	}}
}

func join(lists ...[]field) []field {
	var out []field
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

// layout is the row, in the order in which it is written: our own keys, then TensorRT-LLM's in its order. It has so many groups
// of layers.
func layout(groups int) []field {
	return join([]field{
		{"schema", func(*Static, *Row) any { return Schema }},
		{"node", func(s *Static, _ *Row) any { return &s.Node }},
		{"seq", func(_ *Static, r *Row) any { return &r.Seq }},
		{"drain", func(_ *Static, r *Row) any { return &r.Drain }},
		{"synthetic", func(_ *Static, r *Row) any { return &r.Synthetic }},
		{"clock_id", func(s *Static, _ *Row) any { return &s.ClockID }},
		{"rank_clock_id", func(_ *Static, r *Row) any { return &r.RankClock }},
		{"steady_ns", func(_ *Static, r *Row) any { return &r.StartNS }},
		{"timestamp", func(_ *Static, r *Row) any { return (*wall)(&r.WallNS) }},
		{"iter", func(_ *Static, r *Row) any { return &r.Iter }},
		{"numIterations", func(_ *Static, r *Row) any { return &r.Covers }},
		{"iterLatencyMS", func(_ *Static, r *Row) any { return &r.IterLatency }},
		{"iterSpanMS", func(_ *Static, r *Row) any { return &r.IterSpan }},
		{"newActiveRequestsQueueLatencyMS", func(_ *Static, r *Row) any { return r.first(&r.QueueLatency) }},
	}, requestFields(), limitFields(), []field{
		group("kvCacheStats", true, kvFields()),
		group("staticBatchingStats", false, nulls("numScheduledRequests", "numContextRequests", "numCtxTokens", "numGenTokens", "emptyGenSlots")),
		group("inflightBatchingStats", false, batchFields()),
		null("specDecodingStats"),
		{"schedulerMode", func(s *Static, _ *Row) any { return &s.Mode }},
		{"statsSequence", func(_ *Static, r *Row) any { return &r.Seq }},
		{"statsDroppedFrames", func(_ *Static, r *Row) any { return &r.Dropped }},
		{"hostStepTimeMS", func(_ *Static, r *Row) any { return &r.HostStep }},
		{"prevDeviceStepTimeMS", func(_ *Static, r *Row) any { return &r.PrevDevice }},
		{"gpuForwardTimeMS", func(_ *Static, r *Row) any { return &r.Forward }},
		{"gpuSampleTimeMS", func(_ *Static, r *Row) any { return &r.Sample }},
		{"attentionDpRank", func(_ *Static, r *Row) any { return &r.Rank }},
		{"rank", func(_ *Static, r *Row) any { return &r.Rank }},
		{"requestStats", func(_ *Static, r *Row) any { return &r.PerReq }},
		perGroup("kvCacheIterationStats", byWindow, groups, func(i int) []field { return join(levelFields(i), secondFields(i), reuseFields(i), deltaFields(i)) }),
		perGroup("kvCacheIterationStatsByPoolGroup", array, groups, func(i int) []field {
			return join(poolFields(i), levelFields(i), secondFields(i), deltaFields(i))
		}),
		perGroup("kvCacheIterationStatsByLifecycle", array, groups, func(i int) []field { return join(lifecycleFields(i), reuseFields(i)) }),
		coldGroups(groups),
		{"iterSuspendedRequests", func(_ *Static, r *Row) any { return &r.Requests.Suspended }},
		{"iterResumedRequests", func(_ *Static, r *Row) any { return &r.Requests.Resumed }},
		{"iterDiskPrefetchBlocks", func(_ *Static, r *Row) any { return &r.KV.DiskLoaded }},
		{"iterCachedTokensByLevel", func(_ *Static, r *Row) any {
			return levels{&r.Sums.CachedDevice, &r.Sums.CachedHost, &r.Sums.CachedDisk}
		}},
		{"kvCacheLevelTiers", func(s *Static, _ *Row) any { return levels{&s.Tier, &s.HostTier, &s.DiskTier} }},
		group("kvCacheDiskStats", true, diskFields()),
	})
}

// list is an array of one value.
type list struct{ of any }

// levels is an array of a value for each tier of memory, null for one that the node does not have and left out at the end.
type levels [3]any

// first gives what only rank 0 owns; null in the rows of the others.
func (r *Row) first(at any) any {
	if r.Rank != 0 {
		return nil
	}
	return at
}

func requestFields() []field {
	return []field{
		{"numNewRequests", func(_ *Static, r *Row) any { return r.first(&r.Requests.New) }},
		{"numNewActiveRequests", func(_ *Static, r *Row) any { return r.first(&r.Requests.NewActive) }},
		{"numCompletedRequests", func(_ *Static, r *Row) any { return r.first(&r.Requests.Completed) }},
		{"numCancelledRequests", func(_ *Static, r *Row) any { return r.first(&r.Requests.Cancelled) }},
		{"numExpiredRequests", func(_ *Static, r *Row) any { return r.first(&r.Requests.Expired) }},
		{"numFailedRequests", func(_ *Static, r *Row) any { return r.first(&r.Requests.Failed) }},
		{"numActiveRequests", func(_ *Static, r *Row) any { return &r.Requests.Active }},
		{"numQueuedRequests", func(_ *Static, r *Row) any { return r.first(&r.Requests.Queued) }},
		{"maxNumActiveRequests", func(_ *Static, r *Row) any { return &r.Requests.MaxActive }},
		{"sumPromptTokens", func(_ *Static, r *Row) any { return &r.Sums.Prompt }},
		{"sumCachedTokens", func(_ *Static, r *Row) any { return &r.Sums.Cached }},
		{"sumCtxTokens", func(_ *Static, r *Row) any { return &r.Sums.Context }},
		{"sumOutputTokens", func(_ *Static, r *Row) any { return &r.Sums.Output }},
		{"sumProbeBlocks", func(_ *Static, r *Row) any { return &r.Sums.ProbeBlocks }},
	}
}

func limitFields() []field {
	return []field{
		{"maxBatchSizeStatic", func(s *Static, _ *Row) any { return &s.MaxBatchSize }},
		null("maxBatchSizeTunerRecommended"),
		{"maxBatchSizeRuntime", func(s *Static, _ *Row) any { return &s.MaxBatchSize }},
		{"maxNumTokensStatic", func(s *Static, _ *Row) any { return &s.MaxNumTokens }},
		null("maxNumTokensTunerRecommended"),
		{"maxNumTokensRuntime", func(s *Static, _ *Row) any { return &s.MaxNumTokens }},
		{"gpuMemUsage", func(_ *Static, r *Row) any { return &r.Memory.GPU }},
		{"cpuMemUsage", func(_ *Static, r *Row) any { return &r.Memory.CPU }},
		{"pinnedMemUsage", func(_ *Static, r *Row) any { return &r.Memory.Pinned }},
	}
}

func batchFields() []field {
	return []field{
		{"numScheduledRequests", func(_ *Static, r *Row) any { return &r.Batch.Scheduled }},
		{"numContextRequests", func(_ *Static, r *Row) any { return &r.Batch.Context }},
		{"numGenRequests", func(_ *Static, r *Row) any { return &r.Batch.Gen }},
		{"numPausedRequests", func(_ *Static, r *Row) any { return &r.Batch.Paused }},
		{"numCtxTokens", func(_ *Static, r *Row) any { return &r.Batch.CtxTokens }},
		{"microBatchId", func(_ *Static, r *Row) any { return &r.Batch.Micro }},
		{"avgNumDecodedTokensPerIter", func(_ *Static, r *Row) any { return &r.Batch.DecodedPerIter }},
		{"numCtxKvTokens", func(_ *Static, r *Row) any { return &r.Batch.CtxKVTokens }},
		{"numGenKvTokens", func(_ *Static, r *Row) any { return &r.Batch.GenKVTokens }},
		{"numQueuedContextRequests", func(_ *Static, r *Row) any { return &r.Batch.QueuedCtx }},
		{"numQueuedCtxTokens", func(_ *Static, r *Row) any { return &r.Batch.QueuedCtxTokens }},
		{"numQueuedGenRequests", func(_ *Static, r *Row) any { return &r.Batch.QueuedGen }},
		{"numQueuedGenKvTokens", func(_ *Static, r *Row) any { return &r.Batch.QueuedGenKVTokens }},
		{"numPausedKvTokens", func(_ *Static, r *Row) any { return &r.Batch.PausedKVTokens }},
	}
}

func kvFields() []field {
	return []field{
		{"maxNumBlocks", func(_ *Static, r *Row) any { return &r.KV.Max }},
		{"freeNumBlocks", func(_ *Static, r *Row) any { return &r.KV.Free }},
		{"usedNumBlocks", func(_ *Static, r *Row) any { return &r.KV.Used }},
		{"tokensPerBlock", func(s *Static, _ *Row) any { return &s.TokensPerBlock }},
		{"allocTotalBlocks", func(_ *Static, r *Row) any { return &r.KV.AllocTotal }},
		{"allocNewBlocks", func(_ *Static, r *Row) any { return &r.KV.AllocNew }},
		{"reusedBlocks", func(_ *Static, r *Row) any { return &r.KV.Reused }},
		{"missedBlocks", func(_ *Static, r *Row) any { return &r.KV.Missed }},
		{"cacheHitRate", func(_ *Static, r *Row) any { return &r.KV.HitRate }},
		{"evictableNumBlocks", func(_ *Static, r *Row) any { return &r.KV.Evictable }},
		{"freedBlocks", func(_ *Static, r *Row) any { return &r.KV.Freed }},
		{"conservationViolations", func(_ *Static, r *Row) any { return &r.KV.Violations }},
	}
}

func levelFields(i int) []field {
	return []field{
		{"primaryMaxNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).Max }},
		{"primaryFreeNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).Free }},
		{"primaryUsedNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).Used }},
		{"primaryEvictableNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).Evictable }},
		{"primaryPeakFreeNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).PeakFree }},
		{"primaryPeakUsedNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).PeakUsed }},
		{"primaryPeakEvictableNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).PeakEvictable }},
	}
}

func secondFields(i int) []field {
	return []field{
		{"secondaryMaxNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).SecondaryMax }},
		{"secondaryFreeNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).SecondaryFree }},
		{"secondaryUsedNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).SecondaryUsed }},
		{"secondaryEvictableNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).SecondaryEvictable }},
		{"secondaryPeakFreeNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).SecondaryPeakFree }},
		{"secondaryPeakUsedNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).SecondaryPeakUsed }},
		{"secondaryPeakEvictableNumBlocks", func(_ *Static, r *Row) any { return &r.group(i).SecondaryPeakEvictable }},
	}
}

func deltaFields(i int) []field {
	return []field{
		{"iterAllocTotalBlocks", func(_ *Static, r *Row) any { return &r.group(i).DAllocTotal }},
		{"iterAllocNewBlocks", func(_ *Static, r *Row) any { return &r.group(i).DAllocNew }},
		{"iterGenAllocBlocks", func(_ *Static, r *Row) any { return &r.group(i).DGenAlloc }},
		{"iterOnboardBlocks", func(_ *Static, r *Row) any { return &r.group(i).OnboardBlocks }},
		{"iterOnboardBytes", func(_ *Static, r *Row) any { return &r.group(i).OnboardBytes }},
		{"iterOffloadBlocks", func(_ *Static, r *Row) any { return &r.group(i).OffloadBlocks }},
		{"iterOffloadBytes", func(_ *Static, r *Row) any { return &r.group(i).OffloadBytes }},
		{"iterIntraDeviceCopyBlocks", func(_ *Static, r *Row) any { return &r.group(i).IntraCopyBlocks }},
		{"iterIntraDeviceCopyBytes", func(_ *Static, r *Row) any { return &r.group(i).IntraCopyBytes }},
		{"iterHostDroppedBlocks", func(_ *Static, r *Row) any { return &r.group(i).HostDropped }},
		{"iterHostDroppedBytes", func(_ *Static, r *Row) any { return &r.group(i).HostDroppedBytes }},
	}
}

func diskFields() []field {
	return []field{
		{"maxNumBlocks", func(_ *Static, r *Row) any { return &r.KV.DiskMax }},
		{"usedNumBlocks", func(_ *Static, r *Row) any { return &r.KV.DiskUsed }},
		{"iterLoadedBlocks", func(_ *Static, r *Row) any { return &r.KV.DiskLoaded }},
		{"iterStoredBlocks", func(_ *Static, r *Row) any { return &r.KV.DiskStored }},
		{"iterDroppedBlocks", func(_ *Static, r *Row) any { return &r.KV.DiskDropped }},
		{"iterBrokenBlocks", func(_ *Static, r *Row) any { return &r.KV.DiskBroken }},
	}
}

func reuseFields(i int) []field {
	return []field{
		{"iterReusedBlocks", func(_ *Static, r *Row) any { return &r.group(i).DReused }},
		{"iterFullReusedBlocks", func(_ *Static, r *Row) any { return &r.group(i).DFullReused }},
		{"iterPartialReusedBlocks", func(_ *Static, r *Row) any { return &r.group(i).DPartialReused }},
		{"iterMissedBlocks", func(_ *Static, r *Row) any { return &r.group(i).DMissed }},
		{"iterCacheHitRate", func(_ *Static, r *Row) any { return &r.group(i).DHitRate }},
	}
}

func poolFields(i int) []field {
	return []field{
		{"poolGroupId", func(*Static, *Row) any { return int64(i) }},
		{"slotSize", func(s *Static, _ *Row) any { return list{s.blockBytes(i)} }},
		{"windowSizes", func(s *Static, _ *Row) any { return list{s.tokens(i)} }},
	}
}

func lifecycleFields(i int) []field {
	return []field{
		{"lifeCycleId", func(*Static, *Row) any { return int64(i) }},
		{"poolGroupId", func(*Static, *Row) any { return int64(i) }},
		{"windowSize", func(s *Static, _ *Row) any { return s.window(i) }},
		{"kind", func(*Static, *Row) any { return "attention" }},
	}
}

// coldGroups are the pools of host memory, numbered on their own: they have no life cycle and no changes.
func coldGroups(groups int) field {
	o := object{shape: array}
	for i := range groups {
		o.members = append(o.members, join(poolFields(i), secondFields(i)))
	}
	return nest("kvCacheIterationStatsByColdPoolGroup", o, func(s *Static, r *Row) bool { return r.KV.Sampled && s.HostTier != "" })
}

// group is the KV of a group of layers.
func (r *Row) group(i int) *KV {
	if len(r.Groups) == 0 {
		return &r.KV
	}
	return &r.Groups[i]
}

func (s *Static) blockBytes(i int) *int64 {
	if len(s.Groups) == 0 {
		return &s.BlockBytes
	}
	return &s.Groups[i].BlockBytes
}

func (s *Static) tokens(i int) *int64 {
	if len(s.Groups) == 0 {
		return &s.Window
	}
	return &s.Groups[i].Tokens
}

// window is nil, which is null, if there is one group, whose layers see everything.
func (s *Static) window(i int) any {
	if len(s.Groups) == 0 {
		return nil
	}
	return &s.Groups[i].Window
}
