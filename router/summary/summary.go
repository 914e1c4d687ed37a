package summary

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

// Summary gathers lines. It belongs to one goroutine.
type Summary struct {
	top      int
	counts   Counts
	ttft     histogram
	e2e      histogram
	token    histogram // per token after the first, of requests of one answer
	rest     histogram // |unaccounted|
	spans    map[string]*histogram
	order    []string // names of spans as they first came
	nodes    map[nodeSpan]*histogram
	pairs    map[string]*histogram
	hours    map[string]*histogram
	slowest  []Slow
	paired   tally
	hidden   float64 // ns of hand-over behind prefill
	handover float64 // ns of hand-over
}

// Counts of lines.
type Counts struct {
	Requests     int64            `json:"requests"`
	Outcomes     map[string]int64 `json:"outcomes"`
	Styles       map[string]int64 `json:"styles"`
	Complete     int64            `json:"complete"`
	Incomplete   int64            `json:"incomplete"`
	Amended      int64            `json:"amended"`
	Negative     int64            `json:"negative_spans"`
	Violations   int64            `json:"causality_violations"`
	MaxBoundNS   *int64           `json:"max_bound_ns"`
	PromptTokens int64            `json:"prompt_tokens"`
	CachedTokens int64            `json:"cached_tokens"`
	OutputTokens int64            `json:"output_tokens"`
	KVBytes      int64            `json:"kv_bytes"`
	HiddenShare  *float64         `json:"handover_hidden_share"` // of the hand-over's time, behind prefill
}

// Slow is a request among the slowest by TTFT.
type Slow struct {
	RequestID string `json:"request_id"`
	ClientID  string `json:"client_request_id,omitempty"`
	TTFTNS    int64  `json:"ttft_ns"`
	Span      string `json:"span"` // that took most of it
	Node      string `json:"node"`
	SpanNS    int64  `json:"span_ns"`
}

// New returns an empty summary that keeps the top slowest requests.
func New(top int) *Summary {
	return &Summary{
		top: top, counts: Counts{Outcomes: map[string]int64{}, Styles: map[string]int64{}}, spans: map[string]*histogram{},
		nodes: map[nodeSpan]*histogram{}, pairs: map[string]*histogram{}, hours: map[string]*histogram{},
	}
}

// Add counts a line, which may have been parsed without phases.
func (s *Summary) Add(l *timeline.Line) {
	c := &s.counts
	c.Requests++
	c.Outcomes[string(l.Outcome)]++
	c.Styles[l.Style]++
	if l.Complete {
		c.Complete++
	} else {
		c.Incomplete++
	}
	if l.Amends {
		c.Amended++
	}
	c.Negative += int64(l.NegativeSpans)
	c.Violations += int64(len(l.Violations))
	if l.MaxBoundNS != nil && (c.MaxBoundNS == nil || *l.MaxBoundNS > *c.MaxBoundNS) {
		c.MaxBoundNS = l.MaxBoundNS
	}
	c.PromptTokens += int64(l.Tokens.Prompt)
	c.CachedTokens += int64(l.Tokens.Cached)
	c.OutputTokens += int64(l.Tokens.Output)
	if h := l.Handover; h != nil {
		c.KVBytes += h.Bytes
		if h.HiddenNS != nil && h.DurNS != nil {
			s.hidden += float64(*h.HiddenNS)
			s.handover += float64(*h.DurNS)
		}
	}
	if l.Outcome == phase.Finished { // what failed has no latency to compare
		s.addTimes(l)
	}
}

func (s *Summary) addTimes(l *timeline.Line) {
	if l.TTFTNS != nil {
		s.ttft.add(*l.TTFTNS)
		at(s.pairs, pair(l)).add(*l.TTFTNS)
		if l.WallNS != 0 {
			at(s.hours, time.Unix(0, l.WallNS).UTC().Format("2006-01-02 15:00")).add(*l.TTFTNS)
		}
		s.addSlow(l)
		s.paired.add(l)
	}
	if l.E2ENS != nil {
		s.e2e.add(*l.E2ENS)
		if n := l.Tokens.Output; n > 1 && l.TTFTNS != nil && !several(l) {
			s.token.add((*l.E2ENS - *l.TTFTNS) / int64(n-1))
		}
	}
	if l.UnaccountedNS != nil {
		s.rest.add(max(*l.UnaccountedNS, -*l.UnaccountedNS))
	}
	s.addSpans(l.Spans)
}

// several tells whether the tokens of a line are of several answers, which came beside each other.
func several(l *timeline.Line) bool {
	return slices.ContainsFunc(l.Attempts, func(a timeline.Attempt) bool { return a.Sub > 0 })
}

// nodeSpan is a span on one node.
type nodeSpan struct{ node, name string }

// addSpans counts each name once a request: the chunks of a prefill are one prefill.
func (s *Summary) addSpans(spans []timeline.Span) {
next:
	for i := range spans {
		name, total := spans[i].Name, spans[i].DurNS
		for j := range spans {
			switch {
			case spans[j].Name != name || j == i:
			case j < i:
				continue next
			default:
				total += spans[j].DurNS
			}
		}
		if s.spans[name] == nil {
			name = strings.Clone(name) // a key must not keep the text of its line
			s.order = append(s.order, name)
		}
		k := key(total)
		at(s.spans, name).addKey(k, total)
		node := spans[i].Node
		if strings.IndexByte(node, '>') >= 0 {
			continue
		}
		on := nodeSpan{node, name}
		if s.nodes[on] == nil {
			on = nodeSpan{strings.Clone(node), strings.Clone(name)}
		}
		at(s.nodes, on).addKey(k, total)
	}
}

func at[K comparable](m map[K]*histogram, k K) *histogram {
	h := m[k]
	if h == nil {
		h = &histogram{}
		m[k] = h
	}
	return h
}

// pair is who served the first sub-request: the attempt that began its answer, and of two context nodes that computed the prompt the
// one that ended well.
func pair(l *timeline.Line) string {
	began := 0
	for _, a := range l.Attempts {
		if a.Sub == 0 && a.Given == 0 {
			began = max(began, a.Attempt)
		}
	}
	ctx, gen := "", ""
	for _, a := range l.Attempts {
		switch {
		case a.Sub != 0 || a.Attempt != began:
		case a.Role != phase.Ctx:
			gen = a.Node
		case ctx == "" || a.Outcome == phase.Finished:
			ctx = a.Node
		}
	}
	switch {
	case ctx == "":
		return gen
	case gen == "":
		return ctx
	}
	return ctx + " → " + gen
}

func (s *Summary) addSlow(l *timeline.Line) {
	if s.top == 0 || (len(s.slowest) == s.top && *l.TTFTNS <= s.slowest[s.top-1].TTFTNS) {
		return
	}
	sp := timeline.Longest(l.Spans)
	w := Slow{RequestID: l.RequestID, ClientID: l.ClientRequestID, TTFTNS: *l.TTFTNS, Span: sp.Name, Node: sp.Node, SpanNS: sp.DurNS}
	i, _ := slices.BinarySearchFunc(s.slowest, w, func(a, b Slow) int { return cmp.Compare(b.TTFTNS, a.TTFTNS) })
	s.slowest = slices.Insert(s.slowest, i, w)
	s.slowest = s.slowest[:min(len(s.slowest), s.top)]
}

// Merge adds what o has gathered.
func (s *Summary) Merge(o *Summary) {
	s.counts.merge(&o.counts)
	for _, h := range []struct{ to, from *histogram }{{&s.ttft, &o.ttft}, {&s.e2e, &o.e2e}, {&s.token, &o.token}, {&s.rest, &o.rest}} {
		h.to.merge(h.from)
	}
	for _, m := range []struct{ to, from map[string]*histogram }{{s.spans, o.spans}, {s.pairs, o.pairs}, {s.hours, o.hours}} {
		for k, h := range m.from {
			at(m.to, k).merge(h)
		}
	}
	for k, h := range o.nodes {
		at(s.nodes, k).merge(h)
	}
	for _, name := range o.order {
		if !slices.Contains(s.order, name) {
			s.order = append(s.order, name)
		}
	}
	s.paired.merge(&o.paired)
	s.hidden += o.hidden
	s.handover += o.handover
	s.slowest = append(s.slowest, o.slowest...)
	slices.SortFunc(s.slowest, func(a, b Slow) int {
		return cmp.Or(cmp.Compare(b.TTFTNS, a.TTFTNS), cmp.Compare(a.RequestID, b.RequestID))
	})
	s.slowest = s.slowest[:min(len(s.slowest), s.top)]
}

func (c *Counts) merge(o *Counts) {
	for _, n := range []struct{ to, from *int64 }{
		{&c.Requests, &o.Requests}, {&c.Complete, &o.Complete}, {&c.Incomplete, &o.Incomplete}, {&c.Amended, &o.Amended}, {&c.Negative, &o.Negative},
		{&c.Violations, &o.Violations}, {&c.PromptTokens, &o.PromptTokens}, {&c.CachedTokens, &o.CachedTokens}, {&c.OutputTokens, &o.OutputTokens}, {&c.KVBytes, &o.KVBytes},
	} {
		*n.to += *n.from
	}
	for k, v := range o.Outcomes {
		c.Outcomes[k] += v
	}
	for k, v := range o.Styles {
		c.Styles[k] += v
	}
	if o.MaxBoundNS != nil && (c.MaxBoundNS == nil || *o.MaxBoundNS > *c.MaxBoundNS) {
		c.MaxBoundNS = o.MaxBoundNS
	}
}

// Named are quantiles under a name.
type Named struct {
	Name string `json:"name"`
	Node string `json:"node,omitempty"`
	Quantiles
}

// Result is what a summary says, for JSON and for the terminal.
type Result struct {
	Counts
	TTFT        Quantiles `json:"ttft"`
	E2E         Quantiles `json:"e2e"`
	PerToken    Quantiles `json:"per_token"`
	Unaccounted Quantiles `json:"unaccounted_abs"`
	Spans       []Named   `json:"spans"` // in the order of a request
	Nodes       []Named   `json:"nodes"`
	Pairs       []Named   `json:"pairs"`
	Hours       []Named   `json:"hours"`
	Slowest     []Slow    `json:"slowest"`
}

// Result computes the quantiles.
func (s *Summary) Result() Result {
	r := Result{
		Counts: s.counts, TTFT: s.ttft.quantiles(), E2E: s.e2e.quantiles(), PerToken: s.token.quantiles(), Unaccounted: s.rest.quantiles(),
		Pairs: named(s.pairs), Hours: named(s.hours), Slowest: s.slowest,
	}
	if s.handover > 0 {
		share := s.hidden / s.handover
		r.HiddenShare = &share
	}
	for _, name := range s.order {
		r.Spans = append(r.Spans, Named{Name: name, Quantiles: s.spans[name].quantiles()})
	}
	for on, h := range s.nodes {
		r.Nodes = append(r.Nodes, Named{Name: on.name, Node: on.node, Quantiles: h.quantiles()})
	}
	slices.SortFunc(r.Nodes, func(a, b Named) int { return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Name, b.Name)) })
	return r
}

func named(m map[string]*histogram) (list []Named) {
	for name, h := range m {
		list = append(list, Named{Name: name, Quantiles: h.quantiles()})
	}
	slices.SortFunc(list, func(a, b Named) int { return cmp.Compare(a.Name, b.Name) })
	return list
}
