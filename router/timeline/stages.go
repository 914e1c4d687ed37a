package timeline

import (
	"slices"

	"meridian.internal/shared/phase"
)

// The styles of a request.
const (
	styleGenFirst   = "generation_first"
	styleCtxFirst   = "context_first"
	styleAggregated = "aggregated"
)

// stage is one span of a style's chain. An edge is "R.receive": who (R router, C ctx, G gen, A the node of an aggregated
// request) and which stamp. "x|y" is the first that exists, "x^y" the later of those that exist.
type stage struct {
	name, from, to string
	need           string // all of these records are there and aligned
	lack           string // one of these is not: the router's own view of a leg instead of the node's
	when           condition
	start, end     edge // from and to, as compile reads them
}

type condition int

// Conditions on the router's record; all of a set must hold.
const (
	firstTry condition = 1 << iota
	retried
	streamed
	unstreamed
	several // the last token was read after the first
	moved   // more than one context leg was sent
	chunked // no condition: expands to one span per prefill chunk and per wait between two
	resumed // no condition: a resume that lies within splits it
)

// head and tail are the router's own work, the same in every style.
var head = []stage{
	{name: "router_receive", from: "R.receive_ns", to: "R.parsed_ns"},
	{name: "router_queue", from: "R.parsed_ns", to: "R.admitted_ns"}, // at the door, until the cluster had room
	{name: "router_place", from: "R.admitted_ns|R.parsed_ns", to: "R.placed_ns", when: firstTry},
	{name: "retry", from: "R.admitted_ns|R.parsed_ns", to: "R.placed_ns", when: retried}, // earlier attempts, until the last one was placed
}

// tail is what the router does with tokens. Tokens that were read before the first was sent on leave in one write with it:
// then the answer's last event is that write, and decode, whose time is in relay, is 0.
var tail = []stage{
	{name: "relay", from: "R.first_token_ns", to: "R.first_token_sent_ns", when: streamed | resumed},
	{name: "decode", from: "R.first_token_sent_ns|R.first_token_ns", to: "R.last_token_ns^R.first_token_sent_ns", when: streamed | several | resumed},
	{name: "decode", from: "R.first_token_ns", to: "R.last_token_ns", when: unstreamed | several | resumed},
	{name: "finish", from: "R.last_token_ns^R.first_token_sent_ns", to: "R.end_ns", when: streamed},
	{name: "finish", from: "R.last_token_ns|R.first_token_ns", to: "R.end_ns", when: unstreamed},
}

// genFirst: the gen node admits the request before prefill is spent on it, and its headers release the context leg. The
// hand-over hides behind prefill, so its span begins when the first token was sampled.
var genFirst = []stage{
	{name: "gen_prepare", from: "R.gen_prepare_ns", to: "R.gen_dispatch_ns"},
	{name: "gen_leg", from: "R.gen_dispatch_ns", to: "R.gen_headers_ns", lack: "G"},
	{name: "gen_dispatch", from: "R.gen_dispatch_ns", to: "G.receive_ns", need: "G"},
	{name: "gen_parse", from: "G.receive_ns", to: "G.parsed_ns", need: "G"},
	{name: "gen_admit", from: "G.started_ns|G.parsed_ns", to: "G.admitted_ns", need: "G"},
	{name: "kv_open", from: "G.admitted_ns", to: "G.headers_sent_ns", need: "G"},
	{name: "gen_headers_return", from: "G.headers_sent_ns", to: "R.gen_headers_ns", need: "G"},
	{name: "ctx_retry", from: "R.gen_headers_ns", to: "R.ctx_prepare_ns", when: moved},
	{name: "ctx_prepare", from: "R.ctx_prepare_ns", to: "R.ctx_dispatch_ns"},
	{name: "remote", from: "R.ctx_dispatch_ns", to: "R.first_token_ns", lack: "CG"},
	{name: "ctx_dispatch", from: "R.ctx_dispatch_ns", to: "C.receive_ns", need: "CG"},
	{name: "ctx_parse", from: "C.receive_ns", to: "C.parsed_ns", need: "CG"},
	{name: "ctx_admit", from: "C.started_ns", to: "C.queued_ns", need: "CG"},
	{name: "ctx_queue", from: "C.queued_ns", to: "C.first_scheduled_ns", need: "CG"},
	{name: "device_queue", from: "C.first_scheduled_ns", to: "C.chunk_start", need: "CG"},
	{name: "prefill", from: "C.chunk_start", to: "C.chunk_end", need: "CG", when: chunked},
	{name: "prefill_sync", from: "C.chunk_end", to: "C.first_token_ns", need: "CG"},
	{name: "kv_handover", from: "C.first_token_ns", to: "C.first_token_ns^G.installed_ns", need: "CG"},
	{name: "gen_start", from: "C.first_token_ns^G.installed_ns", to: "G.first_token_ns", need: "CG"},
	{name: "gen_emit", from: "G.first_token_ns", to: "G.first_token_sent_ns", need: "CG"},
	{name: "return_network", from: "G.first_token_sent_ns|G.first_token_ns", to: "R.first_token_ns", need: "CG"},
}

// ctxFirst: prefill, then the gen node fetches the KV.
var ctxFirst = []stage{
	{name: "ctx_retry", from: "R.placed_ns", to: "R.ctx_prepare_ns", when: moved},
	{name: "ctx_prepare", from: "R.ctx_prepare_ns", to: "R.ctx_dispatch_ns"},
	{name: "ctx_leg", from: "R.ctx_dispatch_ns", to: "R.ctx_done_ns", lack: "C"},
	{name: "ctx_dispatch", from: "R.ctx_dispatch_ns", to: "C.receive_ns", need: "C"},
	{name: "ctx_parse", from: "C.receive_ns", to: "C.parsed_ns", need: "C"},
	{name: "ctx_admit", from: "C.started_ns", to: "C.queued_ns", need: "C"},
	{name: "ctx_queue", from: "C.queued_ns", to: "C.first_scheduled_ns", need: "C"},
	{name: "device_queue", from: "C.first_scheduled_ns", to: "C.chunk_start", need: "C"},
	{name: "prefill", from: "C.chunk_start", to: "C.chunk_end", need: "C", when: chunked},
	{name: "prefill_sync", from: "C.chunk_end", to: "C.first_token_ns", need: "C"},
	{name: "ctx_emit", from: "C.first_token_ns", to: "C.end_ns", need: "C"},
	{name: "ctx_return", from: "C.end_ns", to: "R.ctx_done_ns", need: "C"},
	{name: "gen_prepare", from: "R.gen_prepare_ns", to: "R.gen_dispatch_ns"},
	{name: "gen_leg", from: "R.gen_dispatch_ns", to: "R.first_token_ns", lack: "G"},
	{name: "gen_dispatch", from: "R.gen_dispatch_ns", to: "G.receive_ns", need: "G"},
	{name: "gen_parse", from: "G.receive_ns", to: "G.parsed_ns", need: "G"},
	{name: "gen_admit", from: "G.started_ns|G.parsed_ns", to: "G.admitted_ns", need: "G"},
	{name: "kv_handover", from: "G.admitted_ns", to: "G.installed_ns", need: "G"},
	{name: "gen_start", from: "G.installed_ns|G.admitted_ns", to: "G.first_token_ns", need: "G"},
	{name: "gen_emit", from: "G.first_token_ns", to: "G.first_token_sent_ns", need: "G"},
	{name: "return_network", from: "G.first_token_sent_ns|G.first_token_ns", to: "R.first_token_ns", need: "G"},
}

// aggregated: one node does both.
var aggregated = []stage{
	{name: "prepare", from: "R.gen_prepare_ns", to: "R.gen_dispatch_ns"},
	{name: "leg", from: "R.gen_dispatch_ns|R.ctx_dispatch_ns", to: "R.first_token_ns", lack: "A"},
	{name: "dispatch", from: "R.gen_dispatch_ns|R.ctx_dispatch_ns", to: "A.receive_ns", need: "A"},
	{name: "parse", from: "A.receive_ns", to: "A.parsed_ns", need: "A"},
	{name: "kv_fetch", from: "A.started_ns", to: "A.installed_ns", need: "A"}, // of a peer's cached KV
	{name: "admit", from: "A.installed_ns|A.started_ns", to: "A.queued_ns", need: "A"},
	{name: "queue", from: "A.queued_ns", to: "A.first_scheduled_ns", need: "A"},
	{name: "device_queue", from: "A.first_scheduled_ns", to: "A.chunk_start", need: "A"},
	{name: "prefill", from: "A.chunk_start", to: "A.chunk_end", need: "A", when: chunked},
	{name: "prefill_sync", from: "A.chunk_end", to: "A.first_token_ns", need: "A"},
	{name: "emit", from: "A.first_token_ns", to: "A.first_token_sent_ns", need: "A"},
	{name: "return_network", from: "A.first_token_sent_ns|A.first_token_ns", to: "R.first_token_ns", need: "A"},
}

// chain is the work of one sub-request: the records whose stamps the spans are made of.
type chain struct{ r, c, g, a *source }

// newChain picks the records of the attempt that the router's record is about.
func newChain(sources []*source, router *phase.Record) chain {
	var ch chain
	for _, s := range sources {
		r := s.Record
		if r == router {
			ch.r = s
			continue
		}
		if r.Sub != router.Sub {
			continue
		}
		if r.Role == phase.Disagg || r.Attempt != router.Attempt {
			continue
		}
		to := &ch.c
		switch {
		case router.Style == styleAggregated:
			to = &ch.a
		case r.Role == phase.Gen:
			to = &ch.g
		case r.DisaggRequestID != router.DisaggRequestID && (ch.c != nil || ctxLegs(router) > 1):
			continue // it computed the prompt too, and another one served, whose record may be missing
		}
		*to = s
	}
	return ch
}

func (ch chain) who(c byte) *source {
	switch c {
	case 'R':
		return ch.r
	case 'C':
		return ch.c
	case 'G':
		return ch.g
	}
	return ch.a
}

// aligned says whether all of who are there and could be aligned.
func (ch chain) aligned(who string) bool {
	for i := range len(who) {
		if s := ch.who(who[i]); s == nil || !s.ok {
			return false
		}
	}
	return true
}

func (ch chain) holds(st *stage) bool {
	if !ch.aligned(st.need) || (st.lack != "" && ch.aligned(st.lack)) {
		return false
	}
	if st.when == 0 {
		return true
	}
	r := ch.r.Record
	first, last := r.Stamps.FirstTokenNS, r.Stamps.LastTokenNS
	for _, c := range []struct {
		bit  condition
		true bool
	}{
		{firstTry, r.Attempt == 0}, {retried, r.Attempt > 0}, {streamed, r.Streamed}, {unstreamed, !r.Streamed},
		{several, first != nil && last != nil && *last != *first}, {moved, ctxLegs(r) > 1},
	} {
		if st.when&c.bit != 0 && !c.true {
			return false
		}
	}
	return true
}

// ctxLegs counts the context legs of the attempt that r tells of.
func ctxLegs(r *phase.Record) (n int) {
	for _, l := range r.Legs {
		if l.Role == phase.Ctx && l.Sub == r.Sub && l.Attempt == r.Attempt {
			n++
		}
	}
	return n
}

// end is one end of a span.
type end struct {
	point
	src    *source
	name   string // of the stamp that was taken
	before int64  // of a link: the bound of the source's estimate when the stamp was converted
}

// edge finds an end of a span: the first of its stamps that exists, or, where two lists are given, the later of both.
func (ch chain) edge(e *edge) end {
	x := ch.first(e.one)
	if len(e.other) > 0 {
		if y := ch.first(e.other); y.ok && (!x.ok || y.at > x.at) {
			return y
		}
	}
	return x
}

func (ch chain) first(list []mark) end {
	for _, k := range list {
		if s := ch.who(k.who); s != nil && s.points[k.at].ok {
			return end{point: s.points[k.at], src: s, name: pointNames[k.at]}
		}
	}
	return end{}
}

// stagesOf is the whole chain of a style. It is only read.
func stagesOf(style string) []stage {
	switch style {
	case styleCtxFirst:
		return ctxFirstChain
	case styleAggregated:
		return aggregatedChain
	}
	return genFirstChain
}

var (
	genFirstChain   = compile(slices.Concat(head, genFirst, tail))
	ctxFirstChain   = compile(slices.Concat(head, ctxFirst, tail))
	aggregatedChain = compile(slices.Concat(head, aggregated, tail))
)

// resume is the span from the cut of an answer to its next token from another node.
const resume = "resume"

// SpanNames are the names that a line's spans can have.
func SpanNames() (names []string) {
	for _, style := range []string{styleGenFirst, styleCtxFirst, styleAggregated} {
		for _, st := range stagesOf(style) {
			for _, n := range []string{st.name, st.name + "_wait", st.name + "_sample"} {
				if (n == st.name || st.when == chunked) && !slices.Contains(names, n) {
					names = append(names, n)
				}
			}
		}
	}
	return append(names, resume)
}
