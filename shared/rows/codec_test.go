package rows

import (
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"strings"
	"testing"
)

// fill sets a different value in every field.
func fill(v reflect.Value, n *int64) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i), n)
		}
	case reflect.Int64:
		*n++
		v.SetInt(*n * 1000003)
	case reflect.Float64:
		*n++
		v.SetFloat(float64(*n) / 7)
	case reflect.String:
		*n++
		v.SetString(strings.Repeat("x", int(*n)))
	case reflect.Bool:
		v.SetBool(true)
	}
}

func full() (s Static, r Row) {
	n := int64(0)
	fill(reflect.ValueOf(&s).Elem(), &n)
	fill(reflect.ValueOf(&r).Elem(), &n)
	s.Window, s.BlockBytes = s.Groups[0].Tokens, s.Groups[0].BlockBytes // the first group's
	for i := range r.Groups {
		g := &r.Groups[i] // what a group does not tell of itself
		g.Sampled, g.HitRate, g.Violations = false, Ratio{}, 0
		g.AllocTotal, g.AllocNew, g.Reused, g.Missed, g.Freed = 0, 0, 0, 0, 0
		g.DiskMax, g.DiskUsed, g.DiskLoaded, g.DiskStored, g.DiskDropped, g.DiskBroken = Int{}, Int{}, Int{}, Int{}, Int{}, Int{}
	}
	of := KV{Sampled: true, HitRate: r.KV.HitRate, Violations: 5, AllocTotal: 6, AllocNew: 7, Reused: 8, Missed: 9, Freed: 10,
		DiskMax: Some(1), DiskUsed: Some(2), DiskLoaded: Some(3), DiskStored: Some(4), DiskDropped: Some(5), DiskBroken: Some(6)}
	of.Sum(r.Groups)
	r.KV = of
	r.Rank = 0 // which owns every field
	return s, r
}

func TestRowsSurviveARoundTrip(t *testing.T) {
	c := NewCodec()
	fullStatic, fullRow := full()
	for _, tt := range []struct {
		name   string
		static Static
		row    Row
	}{
		{"every field set", fullStatic, fullRow},
		{"one group with a window", Static{Window: 16, BlockBytes: 4, Groups: []Group{{16, Some(16), 4}}}, Row{KV: KV{Sampled: true, Max: 3, DAllocNew: 2}}},
		{"nothing known", Static{Node: "n"}, Row{}},
		{"KV sampled and empty", Static{Window: 128}, Row{KV: KV{Sampled: true}}},
		{"no request", Static{}, Row{PerReq: []Req{}}},
		{"another rank", Static{}, Row{Rank: 3, Requests: Requests{Active: 4}, Sums: Sums{Output: 5}}},
	} {
		text := NewEncoder(tt.static).Append(nil, &tt.row)
		if !json.Valid(text) {
			t.Errorf("%s: no JSON: %s", tt.name, text)
		}
		s, r, err := c.Parse(text)
		if !tt.row.KV.Sampled { // what only the KV groups say is null with them
			s.TokensPerBlock, s.BlockBytes, s.Window = tt.static.TokensPerBlock, tt.static.BlockBytes, tt.static.Window
		}
		if err != nil || !reflect.DeepEqual(s, tt.static) || !reflect.DeepEqual(r, tt.row) {
			t.Errorf("%s: %v\ngot  %+v %+v\nwant %+v %+v", tt.name, err, s, r, tt.static, tt.row)
		}
	}
}

// keys are those of TensorRT-LLM's IterationStats, by group.
var keys = map[string]string{
	"": `timestamp iter iterLatencyMS newActiveRequestsQueueLatencyMS numNewActiveRequests numCompletedRequests numActiveRequests
		numQueuedRequests maxNumActiveRequests maxBatchSizeStatic maxBatchSizeTunerRecommended maxBatchSizeRuntime maxNumTokensStatic
		maxNumTokensTunerRecommended maxNumTokensRuntime gpuMemUsage cpuMemUsage pinnedMemUsage kvCacheStats staticBatchingStats
		inflightBatchingStats specDecodingStats schedulerMode statsSequence statsDroppedFrames hostStepTimeMS prevDeviceStepTimeMS
		gpuForwardTimeMS attentionDpRank rank requestStats kvCacheIterationStats kvCacheIterationStatsByPoolGroup
		kvCacheIterationStatsByLifecycle kvCacheIterationStatsByColdPoolGroup iterSuspendedRequests iterResumedRequests
		iterDiskPrefetchBlocks iterCachedTokensByLevel kvCacheLevelTiers`,
	"kvCacheStats":        `maxNumBlocks freeNumBlocks usedNumBlocks tokensPerBlock allocTotalBlocks allocNewBlocks reusedBlocks missedBlocks cacheHitRate`,
	"staticBatchingStats": `numScheduledRequests numContextRequests numCtxTokens numGenTokens emptyGenSlots`,
	"inflightBatchingStats": `numScheduledRequests numContextRequests numGenRequests numPausedRequests numCtxTokens microBatchId
		avgNumDecodedTokensPerIter numCtxKvTokens numGenKvTokens numQueuedContextRequests numQueuedCtxTokens numQueuedGenRequests
		numQueuedGenKvTokens numPausedKvTokens`,
	"requestStats": `id stage contextPrefillPosition numGeneratedTokens avgNumDecodedTokensPerIter scheduled paused disServingStats
		allocTotalBlocksPerRequest allocNewBlocksPerRequest reusedBlocksPerRequest missedBlocksPerRequest kvCacheHitRatePerRequest`,
	"kvCacheIterationStats": `primaryMaxNumBlocks primaryFreeNumBlocks primaryUsedNumBlocks primaryEvictableNumBlocks
		primaryPeakFreeNumBlocks primaryPeakUsedNumBlocks primaryPeakEvictableNumBlocks secondaryMaxNumBlocks secondaryFreeNumBlocks
		secondaryUsedNumBlocks secondaryEvictableNumBlocks secondaryPeakFreeNumBlocks secondaryPeakUsedNumBlocks
		secondaryPeakEvictableNumBlocks iterAllocTotalBlocks iterAllocNewBlocks iterReusedBlocks iterFullReusedBlocks
		iterPartialReusedBlocks iterMissedBlocks iterCacheHitRate iterGenAllocBlocks iterOnboardBlocks iterOnboardBytes
		iterOffloadBlocks iterOffloadBytes iterIntraDeviceCopyBlocks iterIntraDeviceCopyBytes iterHostDroppedBlocks iterHostDroppedBytes`,
	"kvCacheIterationStatsByPoolGroup": `poolGroupId slotSize windowSizes primaryMaxNumBlocks iterAllocTotalBlocks iterHostDroppedBytes`,
	"kvCacheIterationStatsByLifecycle": `lifeCycleId poolGroupId windowSize kind iterReusedBlocks iterFullReusedBlocks
		iterPartialReusedBlocks iterMissedBlocks iterCacheHitRate`,
	"kvCacheIterationStatsByColdPoolGroup": `poolGroupId slotSize windowSizes secondaryMaxNumBlocks secondaryEvictableNumBlocks secondaryPeakUsedNumBlocks`,
}

func TestEveryKeyIsInEveryRow(t *testing.T) {
	s, r := full()
	for _, row := range []Row{r, {}, {KV: KV{Sampled: true}}} {
		var m map[string]any
		if err := json.Unmarshal(NewEncoder(s).Append(nil, &row), &m); err != nil {
			t.Fatal(err)
		}
		for group, names := range keys {
			in := m
			switch v := m[group].(type) {
			case map[string]any:
				in = v
				if group == "kvCacheIterationStats" {
					in = v[strings.TrimSpace(jsonKey(v))].(map[string]any)
				}
			case []any:
				in = v[0].(map[string]any)
			case nil:
				if group != "" {
					continue // the whole group was not collected: its key is among those of the row
				}
			}
			for name := range strings.FieldsSeq(names) {
				if _, ok := in[name]; !ok {
					t.Errorf("%s has no key %s", group, name)
				}
			}
		}
	}
}

func jsonKey(m map[string]any) string {
	for k := range m {
		return k
	}
	return ""
}

func TestParseRefusesWhatIsNoRow(t *testing.T) {
	for _, text := range []string{"", "[]", `{"schema":"meridian.rows/1"`, `{"schema":"meridian.rows/1","iter":"x"}`, `{"schema":"meridian.rows/1","timestamp":"yesterday"}`} {
		if _, _, err := NewCodec().Parse([]byte(text)); !errors.Is(err, ErrBadRow) {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, _, err := NewCodec().Parse([]byte(`{"schema":"meridian.rows/2"}`)); !errors.Is(err, ErrSchema) {
		t.Error(err)
	}
}

func FuzzParse(f *testing.F) {
	c := NewCodec()
	s, r := full()
	f.Add(NewEncoder(s).Append(nil, &r))
	f.Add(NewEncoder(Static{}).Append(nil, &Row{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, r, err := c.Parse(b)
		if err != nil {
			if !errors.Is(err, ErrBadRow) && !errors.Is(err, ErrSchema) {
				t.Fatalf("undocumented error %v", err)
			}
			return
		}
		if _, _, err := c.Parse(NewEncoder(s).Append(nil, &r)); err != nil {
			t.Fatalf("what was read cannot be written and read again: %v", err)
		}
	})
}

func BenchmarkAppend(b *testing.B) {
	c := NewCodec()
	s, r := full()
	s, r, err := c.Parse(NewEncoder(s).Append(nil, &r)) // of the golden row, if it is there
	if text, gone := os.ReadFile("../../gpu/stats/testdata/overlap.golden.json"); gone == nil {
		s, r, err = c.Parse(text)
	}
	if err != nil {
		b.Fatal(err)
	}
	r.PerReq = nil
	e := NewEncoder(s)
	var buf []byte
	b.ReportAllocs()
	for b.Loop() {
		buf = e.Append(buf[:0], &r)
	}
	b.SetBytes(int64(len(buf)))
}
