package ledger

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/phase"
	"meridian.internal/shared/rows"
)

// names are TensorRT-LLM's of a worker, without its prefix.
const names = `request_success_total e2e_request_latency_seconds time_to_first_token_seconds time_per_output_token_seconds
request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds
prompt_tokens_total generation_tokens_total prompt_cached_tokens_total prompt_cached_tokens_per_request
num_requests_running num_requests_waiting max_num_active_requests num_requests_completed_total iteration_latency_seconds
gpu_memory_usage_bytes cpu_memory_usage_bytes pinned_memory_usage_bytes max_batch_size_static max_batch_size_runtime max_num_tokens_runtime
kv_cache_hit_rate kv_cache_utilization kv_cache_max_blocks kv_cache_free_blocks kv_cache_used_blocks kv_cache_tokens_per_block
kv_cache_reused_blocks_total kv_cache_missed_blocks_total kv_cache_host_utilization kv_cache_iter_reuse_rate
kv_cache_iter_reused_blocks_total kv_cache_iter_full_reused_blocks_total kv_cache_iter_partial_reused_blocks_total
kv_cache_iter_missed_blocks_total kv_cache_intra_device_copy_bytes_total kv_cache_gen_alloc_blocks_total kv_cache_onboard_bytes_total kv_cache_offload_bytes_total
num_context_requests num_generation_requests num_paused_requests num_scheduled_requests total_context_tokens avg_decoded_tokens_per_iter
request_error_total kv_transfer_latency_seconds kv_transfer_bytes_total kv_transfer_speed_bytes_per_second generation_perplexity
prefill_batch_occupancy prefill_batch_tokens scheduled_batch_size model_config_info parallel_config_info kv_cache_config_info`

// docs/metrics.md says which of its names are not here, and why.

func TestTheNamesOfAWorkerAreThere(t *testing.T) {
	reg := prometheus.NewRegistry()
	l := newLedger(t, Options{Keep: 3, Registry: reg, Sink: rows.Sink{Interval: 1}})
	l.Observe(&phase.Record{Outcome: phase.Failed, Error: &phase.Error{Type: "server_error"}, Transfer: &phase.Transfer{
		Bytes: 3 << 20, StartNS: ns(1), LastByteNS: ns(1_000_000_001)}}, Ended{Code: 502})
	one := rows.Some(1)
	r := rows.Row{
		IterLatency: rows.SomeSpan(1), Memory: rows.Memory{GPU: one, CPU: one, Pinned: one},
		Batch: rows.Batch{Scheduled: one, Context: one, Gen: one, Paused: one, CtxTokens: one, DecodedPerIter: rows.RatioOf(1, 1)},
		KV: rows.KV{Sampled: true, Max: 2, HitRate: rows.RatioOf(1, 2), DHitRate: rows.RatioOf(1, 2), SecondaryMax: rows.Some(4), SecondaryUsed: one,
			OnboardBytes: rows.Some(96), OffloadBytes: rows.Some(64), IntraCopyBytes: rows.Some(32)},
	}
	l.Put(&r)
	l.Put(&r)
	l.Observe(&phase.Record{Outcome: phase.Finished, FinishReason: "stop", Tokens: phase.Tokens{Prompt: 4, Cached: 2, Output: 3}, Stamps: phase.Stamps{
		ReceiveNS: ns(1), FirstScheduledNS: ns(2), FirstTokenNS: ns(5e6), LastTokenNS: ns(9e6)}}, Ended{Tokens: new(Tokens)})
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	there, values := map[string]bool{}, map[string]float64{}
	for _, f := range families {
		there[f.GetName()] = true
		values[f.GetName()] = f.GetMetric()[0].GetCounter().GetValue() + f.GetMetric()[0].GetGauge().GetValue()
	}
	for _, name := range strings.Fields(names) {
		if !there[prefix+name] {
			t.Errorf("%s%s is not there", prefix, name)
		}
	}
	for name, want := range map[string]float64{"kv_cache_host_utilization": 0.25, "kv_cache_onboard_bytes_total": 192, "kv_cache_offload_bytes_total": 128, "kv_cache_intra_device_copy_bytes_total": 64, "kv_transfer_bytes_total": 3 << 20} {
		if values[prefix+name] != want {
			t.Errorf("%s is %v, want %v", name, values[prefix+name], want)
		}
	}
}
