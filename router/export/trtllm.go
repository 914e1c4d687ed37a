package export

import (
	"bufio"
	"strings"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/phase"
)

// edges are the thirteen moments between TensorRT-LLM's twelve spans of a request's way to its first token. Each is the
// first stamp of its list that exists: "C.receive_ns" is the context phase's, R the router's, G the generation phase's.
var edges = []struct{ name, from string }{
	{"disagg_server_arrival_time", "R.receive_ns"},
	{"ctx.server_arrival_time", "C.receive_ns"},
	{"ctx.arrival_time", "C.queued_ns|C.parsed_ns"},
	{"ctx.first_scheduled_time", "C.first_scheduled_ns"},
	{"ctx.first_token_time", "C.first_token_ns"},
	{"ctx.server_first_token_time", "C.first_token_sent_ns|C.end_ns"},
	{"gen.server_arrival_time", "G.receive_ns"},
	{"gen.arrival_time", "G.admitted_ns|G.parsed_ns"},
	{"gen.kv_cache_transfer_start", "G.transfer.start_ns|G.transfer.requested_ns"},
	{"gen.kv_cache_transfer_end", "G.transfer.installed_ns"},
	{"gen.first_scheduled_time", "G.first_scheduled_ns"},
	{"gen.server_first_token_time", "G.first_token_sent_ns"},
	{"disagg_server_first_token_time", "R.first_token_ns"},
}

// spanNames are TensorRT-LLM's names of the twelve spans between two neighbouring edges.
var spanNames = []string{
	"disagg_preprocessing", "ctx_preprocessing", "ctx_queue", "ctx_processing", "ctx_postprocessing", "disagg_relay",
	"gen_preprocessing", "gen_queue_wait", "gen_kv_transfer", "gen_post_transfer", "gen_postprocessing", "disagg_postprocessing",
}

// Breakdown gives TensorRT-LLM's twelve spans in ns, under their names, as far as both ends are known. Nothing is clamped:
// in generation_first the generation node is asked first, so disagg_relay is negative.
func Breakdown(l *timeline.Line) map[string]int64 {
	out := map[string]int64{}
	for i, name := range spanNames {
		a, ok := find(l, edges[i].from)
		b, ok2 := find(l, edges[i+1].from)
		if ok && ok2 {
			out[name] = b - a
		}
	}
	return out
}

// find looks up an edge in the phases of the attempt that began the answer.
func find(l *timeline.Line, from string) (int64, bool) {
	router, ctx, gen := l.Chain()
	for from != "" {
		var alt string
		alt, from, _ = strings.Cut(from, "|")
		if p := map[byte]*timeline.Phase{'R': router, 'C': ctx, 'G': gen}[alt[0]]; p != nil {
			if v, ok := p.At(alt[2:]); ok {
				return v, true
			}
		}
	}
	return 0, false
}

// trtllm writes the orchestrator's JSONL, which TensorRT-LLM's time_breakdown reads. Requests without both legs are left
// out: that format has no word for them.
type trtllm struct {
	w *bufio.Writer
}

// Line adds a request.
func (t *trtllm) Line(l *timeline.Line) error {
	_, c, g := l.Chain()
	if c == nil || g == nil || l.Outcome != phase.Finished {
		return nil
	}
	var w jsonline.Writer
	w.Open('{')
	w.Str("ctx_server", c.Node)
	w.Str("gen_server", g.Node)
	seconds(&w, l, "disagg_server_arrival_time", "R.receive_ns")
	seconds(&w, l, "disagg_ctx_dispatch_time", "R.ctx_dispatch_ns")
	seconds(&w, l, "disagg_server_first_token_time", "R.first_token_ns")
	w.Str("status", "complete")
	w.Int("disagg_request_id", c.Disagg)
	t.worker(&w, l, "ctx", c)
	t.worker(&w, l, "gen", g)
	w.Close('}')
	_, err := t.w.Write(append(w.B, '\n'))
	return err
}

func (t *trtllm) worker(w *jsonline.Writer, l *timeline.Line, which string, p *timeline.Phase) {
	w.OpenKey(which+"_perf_metrics", '{')
	w.Int("request_id", p.Disagg)
	w.OpenKey("perf_metrics", '{')
	w.OpenKey("timing_metrics", '{')
	for _, e := range edges {
		if len(e.name) > 4 && e.name[:4] == which+"." {
			seconds(w, l, e.name[4:], e.from)
		}
	}
	role := map[string]string{"ctx": "C.", "gen": "G."}[which]
	if which == "gen" {
		seconds(w, l, "first_token_time", role+"first_token_ns")
	}
	seconds(w, l, "last_token_time", role+"last_token_ns|"+role+"first_token_ns")
	w.OptInt("kv_cache_size", p.Bytes)
	w.Close('}')
	if p.Iters != nil {
		w.Int("first_iter", p.Iters.First)
		w.Int("last_iter", p.Iters.Last)
	}
	if k := p.KV; k != nil {
		w.OpenKey("kv_cache_metrics", '{')
		w.Int("num_total_allocated_blocks", int64(k.AllocTotalBlocks))
		w.Int("num_new_allocated_blocks", int64(k.AllocNewBlocks))
		w.Int("num_reused_blocks", int64(k.ReusedBlocks))
		w.Int("num_missed_blocks", int64(k.MissedBlocks))
		w.Close('}')
	}
	w.Close('}')
	w.Close('}')
}

// seconds writes an edge as seconds of the reference clock; null if it is not known.
func seconds(w *jsonline.Writer, l *timeline.Line, key, from string) {
	v, ok := find(l, from)
	if !ok {
		w.Null(key)
		return
	}
	w.Key(key)
	w.B = appendFixed(w.B, l.StartNS+v, 9)
}

// Close ends the file.
func (t *trtllm) Close() error { return t.w.Flush() }
