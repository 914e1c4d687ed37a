package stats

import (
	"strconv"
	"time"

	"meridian.internal/gpu/engine"
)

// kvRefresh is how many iterations the KV utilisation of the log is kept.
const kvRefresh = 16

// Log writes a line for each iteration, in the words of TensorRT-LLM's iteration log.
type Log struct {
	Write func(line string)
	Max   int // requests that can be active
	Rank  int

	util      string
	untilUtil int
	last      int64 // EndNS of the iteration before
	device    int64 // its device time; -1: unknown
	b         []byte
}

// Iterated writes the line of an iteration.
func (l *Log) Iterated(it *engine.Iteration) {
	if l.untilUtil == 0 {
		l.untilUtil, l.util = kvRefresh, "N/A"
		if it.Pool != nil {
			kv := it.Pool.Stats()
			l.util = strconv.FormatFloat(float64(kv.Used+kv.Leased)/float64(kv.Max), 'f', 3, 64)
		}
	}
	l.untilUtil--
	l.b = l.b[:0]
	l.int("iter", it.Iter)
	l.int("global_rank", int64(l.Rank))
	l.int("rank", int64(l.Rank))
	l.int("num_scheduled_requests", int64(it.BatchSize))
	l.int("adp_dummy_ctx_tokens", 0)
	l.int("adp_dummy_gen_tokens", 0)
	l.text("kv_cache_util", l.util)
	l.text("currank_total_requests", strconv.Itoa(it.Running)+"/"+strconv.Itoa(l.Max))
	l.text("host_step_time", milliseconds(it.EndNS-max(l.last, it.BuiltNS)))
	device := "N/A"
	if l.last != 0 && l.device >= 0 {
		device = milliseconds(l.device)
	}
	l.text("prev_device_step_time", device)
	l.text("timestamp", time.Now().UTC().Format(time.RFC3339))
	l.text("states", "{num_ctx_requests: "+strconv.Itoa(it.ContextSeqs)+", num_ctx_tokens: "+strconv.Itoa(it.ContextTokens)+
		", num_generation_tokens: "+strconv.Itoa(it.DecodeSeqs)+"}")
	l.int("num_active", int64(it.Running))
	l.int("num_fetched", int64(it.NewRequests))
	dummies := int64(0)
	if it.Synthetic {
		dummies = 1
	}
	l.int("num_dummy", dummies)
	l.int("num_unscheduled", int64(max(it.Running-it.BatchSize, 0)))
	l.last, l.device = it.EndNS, it.Stamps.SampleEndNS-it.Stamps.ForwardStartNS
	if it.Err != nil || it.Synthetic {
		l.device = -1
	}
	l.Write(string(l.b))
}

func milliseconds(ns int64) string { return strconv.FormatFloat(float64(ns)/1e6, 'f', 3, 64) + "ms" }

func (l *Log) int(key string, v int64) { l.text(key, strconv.FormatInt(v, 10)) }

func (l *Log) text(key, v string) {
	if len(l.b) > 0 {
		l.b = append(l.b, ", "...)
	}
	l.b = append(append(append(l.b, key...), " = "...), v...)
}
