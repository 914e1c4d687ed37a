package ledger

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

const vllmPrefix = "vllm:"

func vllmLabels(model string) prometheus.Labels {
	return prometheus.Labels{"model_name": model, "engine": "0"}
}

// vllm exports what dashboards and gateways that were made for vLLM read, under its names. Colons are not for exporters,
// says promtool; they are how these names are spelled.
type vllm struct {
	l      *Ledger
	e      Engine
	info   *prometheus.Desc
	gauges map[string]*prometheus.Desc
	total  map[string]*prometheus.Desc
	hists  []mirror
}

// mirror is a histogram of ours under another name.
type mirror struct {
	desc *prometheus.Desc
	of   prometheus.Histogram
}

func newVLLM(l *Ledger, e *Engine) *vllm {
	labels := vllmLabels(e.Model)
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc(vllmPrefix+name, help, nil, labels)
	}
	v := &vllm{l: l, e: *e, gauges: map[string]*prometheus.Desc{
		"running": desc("num_requests_running", "Requests that hold a slot."),
		"waiting": desc("num_requests_waiting", "Requests in the queue."),
		"kv":      desc("kv_cache_usage_perc", "Share of KV blocks that are held; 1 is all."),
	}, total: map[string]*prometheus.Desc{
		"prompt":     desc("prompt_tokens_total", "Prompt tokens of finished requests."),
		"generation": desc("generation_tokens_total", "Tokens of finished requests."),
		"queries":    desc("prefix_cache_queries_total", "Prompt tokens that were looked for in the KV cache."),
		"hits":       desc("prefix_cache_hits_total", "Prompt tokens whose KV was found there."),
	}, hists: []mirror{
		{desc("time_to_first_token_seconds", "Arrival to first token."), l.requests.ttft},
		{desc("e2e_request_latency_seconds", "Arrival to last token."), l.requests.e2e},
	}}
	config := vllmLabels(e.Model)
	config["block_size"] = strconv.FormatInt(e.TokensPerBlock, 10)
	config["num_gpu_blocks"] = strconv.Itoa(e.Blocks * max(e.Ranks, 1))
	config["enable_prefix_caching"] = strconv.FormatBool(e.PrefixReuse)
	config["cache_dtype"] = "auto"
	v.info = prometheus.NewDesc(vllmPrefix+"cache_config_info", "The KV cache; always 1.", nil, config)
	return v
}

// Describe sends the names.
func (v *vllm) Describe(to chan<- *prometheus.Desc) {
	to <- v.info
	for _, d := range v.gauges {
		to <- d
	}
	for _, d := range v.total {
		to <- d
	}
	for _, m := range v.hists {
		to <- m.desc
	}
}

// Collect sends the values.
func (v *vllm) Collect(to chan<- prometheus.Metric) {
	to <- prometheus.MustNewConstMetric(v.info, gauge, 1)
	if v.e.Load != nil {
		load := v.e.Load()
		to <- prometheus.MustNewConstMetric(v.gauges["running"], gauge, float64(load.Running))
		to <- prometheus.MustNewConstMetric(v.gauges["waiting"], gauge, float64(load.Waiting))
		to <- prometheus.MustNewConstMetric(v.gauges["kv"], gauge, float64(load.KVUsedBlocks)/float64(max(load.KVMaxBlocks, 1)))
	}
	s, _ := v.l.snapshot()
	to <- prometheus.MustNewConstMetric(v.total["prompt"], counter, valueOf(v.l.requests.promptTokens))
	to <- prometheus.MustNewConstMetric(v.total["generation"], counter, valueOf(v.l.requests.outputTokens))
	to <- prometheus.MustNewConstMetric(v.total["queries"], counter, float64(s.sums.Prompt))
	to <- prometheus.MustNewConstMetric(v.total["hits"], counter, float64(s.sums.Cached))
	for _, m := range v.hists {
		if h := m.read(); h != nil {
			to <- h
		}
	}
}

func valueOf(c prometheus.Counter) float64 {
	var m dto.Metric
	if c.Write(&m) != nil {
		return 0
	}
	return m.GetCounter().GetValue()
}

func (m mirror) read() prometheus.Metric {
	var d dto.Metric
	if m.of.Write(&d) != nil {
		return nil
	}
	h := d.GetHistogram()
	buckets := make(map[float64]uint64, len(h.GetBucket()))
	for _, b := range h.GetBucket() {
		buckets[b.GetUpperBound()] = b.GetCumulativeCount()
	}
	return prometheus.MustNewConstHistogram(m.desc, h.GetSampleCount(), h.GetSampleSum(), buckets)
}
