package ledger

import (
	"math"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/phase"
)

// The buckets of seconds. TensorRT-LLM's begin where a small model has long ended; these go down to a millisecond and,
// for tokens, to a tenth of one.
func requestBuckets() []float64 {
	return []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640, 2560}
}

func tokenBuckets() []float64 {
	return []float64{.0001, .0002, .0005, .001, .002, .005, .01, .02, .03, .05, .075, .1, .15, .2, .3, .5, .75, 1, 2.5, 5, 10}
}

// histogram has classic buckets, and a native histogram for who asks for one.
func histogram(name, help string, buckets []float64, labels prometheus.Labels) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{
		Name: prefix + name, Help: help, Buckets: buckets, ConstLabels: labels,
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 160,
	}
}

// requestMetrics count ended requests. Probes are in none of them.
type requestMetrics struct {
	success, errors                                              *prometheus.CounterVec
	promptTokens, outputTokens, cachedTokens, transfer, negative prometheus.Counter
	e2e, ttft, tpot, queue, prefill, decode, inference           prometheus.Histogram
	cachedPerRequest, transferTime, transferSpeed, perplexity    prometheus.Histogram
	gaps                                                         *gapMetrics
}

func newRequestMetrics(labels prometheus.Labels, vllm bool) *requestMetrics {
	c := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + name, Help: help, ConstLabels: labels})
	}
	vec := func(name, help string, of ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + name, Help: help, ConstLabels: labels}, of)
	}
	h := func(name, help string, buckets []float64) prometheus.Histogram {
		return prometheus.NewHistogram(histogram(name, help, buckets, labels))
	}
	return &requestMetrics{
		success:          vec("request_success_total", "Finished requests.", "finished_reason"),
		errors:           vec("request_error_total", "Requests that ended with an error, by its type and the HTTP status that goes with it.", "error_type", "http_code"),
		promptTokens:     c("prompt_tokens_total", "Prompt tokens of finished requests."),
		outputTokens:     c("generation_tokens_total", "Tokens that finished requests got here."),
		cachedTokens:     c("prompt_cached_tokens_total", "Prompt tokens of finished requests whose KV was here already."),
		transfer:         c("kv_transfer_bytes_total", "KV bytes handed over by ended requests."),
		negative:         c("request_time_negative_total", "Durations that came out negative: they are in no histogram."),
		e2e:              h("e2e_request_latency_seconds", "Arrival to last token.", requestBuckets()),
		ttft:             h("time_to_first_token_seconds", "Arrival to first token.", requestBuckets()),
		tpot:             h("time_per_output_token_seconds", "First to last token, by the tokens after the first.", tokenBuckets()),
		queue:            h("request_queue_time_seconds", "Arrival to the first batch.", requestBuckets()),
		prefill:          h("request_prefill_time_seconds", "First batch to first token, where prefill runs here.", requestBuckets()),
		decode:           h("request_decode_time_seconds", "First to last token.", requestBuckets()),
		inference:        h("request_inference_time_seconds", "First batch to last token.", requestBuckets()),
		cachedPerRequest: h("prompt_cached_tokens_per_request", "Prompt tokens whose KV was here already, 0 included.", []float64{0, 64, 128, 256, 512, 1024, 2048, 4096, 8192}),
		transferTime:     h("kv_transfer_latency_seconds", "First to last byte of KV hand-overs.", requestBuckets()),
		transferSpeed:    h("kv_transfer_speed_bytes_per_second", "Bytes of a KV hand-over by the time from its first to its last byte.", prometheus.ExponentialBuckets(1<<20, 4, 9)),
		perplexity:       h("generation_perplexity", "Perplexity of the tokens of a request that asked for log probabilities.", []float64{1, 2, 5, 10, 25, 50, 100, 500, 1000}),
		gaps:             newGapMetrics(labels, vllm),
	}
}

func (m *requestMetrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.success, m.errors, m.promptTokens, m.outputTokens, m.cachedTokens, m.transfer, m.negative, m.e2e, m.ttft,
		m.tpot, m.queue, m.prefill, m.decode, m.inference, m.cachedPerRequest, m.transferTime, m.transferSpeed, m.perplexity, m.gaps}
}

// Ended is what is known of an ended attempt besides its record.
type Ended struct {
	Tokens *Tokens // nil: it had none
	Code   int     // HTTP status that goes with its error; 200 if the fault came to light after the answer
}

// Observe counts an ended attempt.
func (l *Ledger) Observe(rec *phase.Record, e Ended) {
	if l == nil || l.requests == nil || rec.Probe {
		return
	}
	l.requests.observe(rec, e.Code)
	if t := e.Tokens; t != nil && t.lastNS != 0 {
		l.requests.gaps.add(t)
		if t.logprob != 0 {
			l.requests.perplexity.Observe(math.Exp(-t.logprob / float64(t.number())))
		}
	}
}

func (m *requestMetrics) observe(rec *phase.Record, code int) {
	if t := rec.Transfer; t != nil {
		m.transfer.Add(float64(t.Bytes))
		m.span(m.transferTime, t.StartNS, t.LastByteNS)
		if t.Bytes > 0 && t.StartNS != nil && t.LastByteNS != nil && *t.LastByteNS > *t.StartNS {
			m.transferSpeed.Observe(float64(t.Bytes) / (float64(*t.LastByteNS-*t.StartNS) / 1e9))
		}
	}
	if rec.Outcome != phase.Finished {
		kind := string(rec.Outcome)
		if rec.Error != nil {
			kind = rec.Error.Type
		}
		m.errors.WithLabelValues(kind, strconv.Itoa(code)).Inc()
		return
	}
	s := nodeStamps(rec)
	m.success.WithLabelValues(rec.FinishReason).Inc()
	m.promptTokens.Add(float64(rec.Tokens.Prompt))
	m.outputTokens.Add(float64(rec.Tokens.Output))
	m.cachedTokens.Add(float64(rec.Tokens.Cached))
	m.cachedPerRequest.Observe(float64(rec.Tokens.Cached))
	m.span(m.e2e, s.ReceiveNS, s.LastTokenNS)
	m.span(m.ttft, s.ReceiveNS, s.FirstTokenNS)
	m.span(m.queue, s.ReceiveNS, s.FirstScheduledNS)
	m.span(m.decode, s.FirstTokenNS, s.LastTokenNS)
	m.span(m.inference, s.FirstScheduledNS, s.LastTokenNS)
	if len(rec.Chunks) > 0 {
		m.span(m.prefill, s.FirstScheduledNS, s.FirstTokenNS)
	}
	if n := rec.Tokens.Output - 1; n > 0 && s.FirstTokenNS != nil && s.LastTokenNS != nil {
		m.tpot.Observe(float64(*s.LastTokenNS-*s.FirstTokenNS) / 1e9 / float64(n))
	}
}

// nodeStamps are the stamps of a record on its node's clock, by what the node knew of its rank's: these metrics are its own face. Those
// that cannot be placed are left out.
func nodeStamps(rec *phase.Record) *phase.Stamps {
	s := rec.Stamps
	if s.EngineClock == 0 {
		return &rec.Stamps
	}
	e := rec.Clocks[s.EngineClock].Estimate
	for _, at := range s.Engine() {
		if *at == nil {
			continue
		}
		ns, _, ok := e.Convert(**at)
		if *at = nil; ok {
			*at = &ns
		}
	}
	return &s
}

// span observes a duration whose ends are both known.
func (m *requestMetrics) span(h prometheus.Histogram, from, to *int64) {
	switch {
	case from == nil || to == nil:
	case *to < *from:
		m.negative.Inc()
	default:
		h.Observe(float64(*to-*from) / 1e9)
	}
}
