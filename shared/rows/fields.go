package rows

// field is a key and where its value is: a pointer to an int64, bool, string, Int, Span, Ratio or time; a []field of an
// object; nil for null.
type field struct {
	key string
	at  func(s *Static, r *Row) any
}

// wall is Unix time in ns, in JSON RFC 3339 in UTC.
type wall int64

// object is a nested group. With many it is an array of one; keyed by window it is a map of one.
type object struct {
	fields []field
	shape  shape
	absent bool // null
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

func group(key string, sh shape, kv bool, fields ...[]field) field {
	all := join(fields...)
	present, absent := &object{all, sh, false}, &object{all, sh, true} // made once: a row is written without allocations
	return field{key, func(_ *Static, r *Row) any {
		if kv && !r.KV.Sampled {
			return absent
		}
		return present
	}}
}

func join(lists ...[]field) []field {
	var out []field
	for _, l := range lists {
		out = append(out, l...)
	}
	return out
}

// layout is the row, in the order in which it is written: our own keys, then TensorRT-LLM's in its order.
func layout() []field {
	return join([]field{
		{"schema", func(*Static, *Row) any { return Schema }},
		{"node", func(s *Static, _ *Row) any { return &s.Node }},
		{"seq", func(_ *Static, r *Row) any { return &r.Seq }},
		{"drain", func(_ *Static, r *Row) any { return &r.Drain }},
		{"clock_id", func(s *Static, _ *Row) any { return &s.ClockID }},
		{"steady_ns", func(_ *Static, r *Row) any { return &r.StartNS }},
		{"timestamp", func(_ *Static, r *Row) any { return (*wall)(&r.WallNS) }},
		{"iter", func(_ *Static, r *Row) any { return &r.Iter }},
		{"numIterations", func(_ *Static, r *Row) any { return &r.Covers }},
		{"iterLatencyMS", func(_ *Static, r *Row) any { return &r.IterLatency }},
		{"iterSpanMS", func(_ *Static, r *Row) any { return &r.IterSpan }},
		{"newActiveRequestsQueueLatencyMS", func(_ *Static, r *Row) any { return &r.QueueLatency }},
	}, requestFields(), limitFields(), []field{
		group("kvCacheStats", plain, true, kvFields()),
		group("staticBatchingStats", plain, false, nulls("numScheduledRequests", "numContextRequests", "numCtxTokens", "numGenTokens", "emptyGenSlots")),
		group("inflightBatchingStats", plain, false, batchFields()),
		null("specDecodingStats"),
		{"schedulerMode", func(s *Static, _ *Row) any { return &s.Mode }},
		{"statsSequence", func(_ *Static, r *Row) any { return &r.Seq }},
		{"statsDroppedFrames", func(*Static, *Row) any { return zero }}, // the engine itself puts rows into the ring: nothing lies between
		{"hostStepTimeMS", func(_ *Static, r *Row) any { return &r.HostStep }},
		{"prevDeviceStepTimeMS", func(_ *Static, r *Row) any { return &r.PrevDevice }},
		{"gpuForwardTimeMS", func(_ *Static, r *Row) any { return &r.Forward }},
		{"gpuSampleTimeMS", func(_ *Static, r *Row) any { return &r.Sample }},
		{"attentionDpRank", func(*Static, *Row) any { return zero }},
		{"rank", func(s *Static, _ *Row) any { return &s.Rank }},
		{"requestStats", func(_ *Static, r *Row) any { return &r.PerReq }},
		group("kvCacheIterationStats", byWindow, true, levelFields(), reuseFields(), deltaFields()),
		group("kvCacheIterationStatsByPoolGroup", array, true, poolFields(), levelFields(), deltaFields()),
		group("kvCacheIterationStatsByLifecycle", array, true, lifecycleFields(), reuseFields()),
		null("kvCacheIterationStatsByColdPoolGroup"),
		{"iterSuspendedRequests", func(_ *Static, r *Row) any { return &r.Requests.Suspended }},
		{"iterResumedRequests", func(_ *Static, r *Row) any { return &r.Requests.Resumed }},
		{"iterDiskPrefetchBlocks", func(_ *Static, r *Row) any { return &r.KV.DiskLoaded }},
		{"iterCachedTokensByLevel", func(_ *Static, r *Row) any {
			return levels{&r.Sums.CachedDevice, &r.Sums.CachedHost, &r.Sums.CachedDisk}
		}},
		{"kvCacheLevelTiers", func(s *Static, _ *Row) any { return levels{&s.Tier, &s.HostTier, &s.DiskTier} }},
		group("kvCacheDiskStats", plain, true, diskFields()),
	})
}

// list is an array of one value.
type list struct{ of any }

// levels is an array of a value for each tier of memory, null for one that the node does not have and left out at the end.
type levels [3]any

// zero is a value that cannot be another.
const zero = int64(0)

func requestFields() []field {
	return []field{
		{"numNewRequests", func(_ *Static, r *Row) any { return &r.Requests.New }},
		{"numNewActiveRequests", func(_ *Static, r *Row) any { return &r.Requests.NewActive }},
		{"numCompletedRequests", func(_ *Static, r *Row) any { return &r.Requests.Completed }},
		{"numCancelledRequests", func(_ *Static, r *Row) any { return &r.Requests.Cancelled }},
		{"numExpiredRequests", func(_ *Static, r *Row) any { return &r.Requests.Expired }},
		{"numFailedRequests", func(_ *Static, r *Row) any { return &r.Requests.Failed }},
		{"numActiveRequests", func(_ *Static, r *Row) any { return &r.Requests.Active }},
		{"numQueuedRequests", func(_ *Static, r *Row) any { return &r.Requests.Queued }},
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
	}
}

func levelFields() []field {
	return append([]field{
		{"primaryMaxNumBlocks", func(_ *Static, r *Row) any { return &r.KV.Max }},
		{"primaryFreeNumBlocks", func(_ *Static, r *Row) any { return &r.KV.Free }},
		{"primaryUsedNumBlocks", func(_ *Static, r *Row) any { return &r.KV.Used }},
		{"primaryEvictableNumBlocks", func(_ *Static, r *Row) any { return &r.KV.Evictable }},
		{"primaryPeakFreeNumBlocks", func(_ *Static, r *Row) any { return &r.KV.PeakFree }},
		{"primaryPeakUsedNumBlocks", func(_ *Static, r *Row) any { return &r.KV.PeakUsed }},
		{"primaryPeakEvictableNumBlocks", func(_ *Static, r *Row) any { return &r.KV.PeakEvictable }},
		{"secondaryMaxNumBlocks", func(_ *Static, r *Row) any { return &r.KV.SecondaryMax }},
		{"secondaryFreeNumBlocks", func(_ *Static, r *Row) any { return &r.KV.SecondaryFree }},
		{"secondaryUsedNumBlocks", func(_ *Static, r *Row) any { return &r.KV.SecondaryUsed }},
	}, nulls("secondaryEvictableNumBlocks", "secondaryPeakFreeNumBlocks", "secondaryPeakUsedNumBlocks", "secondaryPeakEvictableNumBlocks")...)
}

func deltaFields() []field {
	return []field{
		{"iterAllocTotalBlocks", func(_ *Static, r *Row) any { return &r.KV.DAllocTotal }},
		{"iterAllocNewBlocks", func(_ *Static, r *Row) any { return &r.KV.DAllocNew }},
		{"iterGenAllocBlocks", func(_ *Static, r *Row) any { return &r.KV.DGenAlloc }},
		{"iterOnboardBlocks", func(_ *Static, r *Row) any { return &r.KV.OnboardBlocks }},
		{"iterOnboardBytes", func(_ *Static, r *Row) any { return &r.KV.OnboardBytes }},
		{"iterOffloadBlocks", func(_ *Static, r *Row) any { return &r.KV.OffloadBlocks }},
		{"iterOffloadBytes", func(_ *Static, r *Row) any { return &r.KV.OffloadBytes }},
		{"iterIntraDeviceCopyBlocks", func(_ *Static, r *Row) any { return &r.KV.IntraCopyBlocks }},
		{"iterIntraDeviceCopyBytes", func(_ *Static, r *Row) any { return &r.KV.IntraCopyBytes }},
		{"iterHostDroppedBlocks", func(_ *Static, r *Row) any { return &r.KV.HostDropped }},
		{"iterHostDroppedBytes", func(_ *Static, r *Row) any { return &r.KV.HostDroppedBytes }},
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

func reuseFields() []field {
	return []field{
		{"iterReusedBlocks", func(_ *Static, r *Row) any { return &r.KV.DReused }},
		{"iterFullReusedBlocks", func(_ *Static, r *Row) any { return &r.KV.DFullReused }},
		{"iterPartialReusedBlocks", func(_ *Static, r *Row) any { return &r.KV.DPartialReused }},
		{"iterMissedBlocks", func(_ *Static, r *Row) any { return &r.KV.DMissed }},
		{"iterCacheHitRate", func(_ *Static, r *Row) any { return &r.KV.DHitRate }},
	}
}

func poolFields() []field {
	return []field{
		{"poolGroupId", func(*Static, *Row) any { return zero }},
		{"slotSize", func(s *Static, _ *Row) any { return list{&s.BlockBytes} }},
		{"windowSizes", func(s *Static, _ *Row) any { return list{&s.Window} }},
	}
}

func lifecycleFields() []field {
	return []field{
		{"lifeCycleId", func(*Static, *Row) any { return zero }},
		{"poolGroupId", func(*Static, *Row) any { return zero }},
		{"windowSize", func(s *Static, _ *Row) any { return &s.Window }},
		{"kind", func(*Static, *Row) any { return "attention" }},
	}
}
