package rows

import "meridian.internal/shared/jsonline"

// reqField is a key of requestStats.
type reqField struct {
	key string
	at  func(q *Req) any
}

func reqLayout() []reqField {
	return []reqField{
		{"id", func(q *Req) any { return &q.ID }},
		{"stage", func(q *Req) any { return &q.Stage }},
		{"contextPrefillPosition", func(q *Req) any { return &q.Prefilled }},
		{"numGeneratedTokens", func(q *Req) any { return &q.Generated }},
		{"avgNumDecodedTokensPerIter", func(q *Req) any { return &q.DecodedPerIter }},
		{"scheduled", func(q *Req) any { return &q.Scheduled }},
		{"paused", func(q *Req) any { return &q.Paused }},
		{"disServingStats", nil}, // the hand-over is in the request's own record
		{"allocTotalBlocksPerRequest", func(q *Req) any { return &q.AllocTotal }},
		{"allocNewBlocksPerRequest", func(q *Req) any { return &q.AllocNew }},
		{"reusedBlocksPerRequest", func(q *Req) any { return &q.Reused }},
		{"missedBlocksPerRequest", func(q *Req) any { return &q.Missed }},
		{"kvCacheHitRatePerRequest", func(q *Req) any { return &q.HitRate }},
	}
}

func appendRequests(b []byte, list []Req) []byte {
	fields := reqLayout()
	w := jsonline.Writer{B: append(b, '[')}
	for i := range list {
		w.Open('{')
		for _, f := range fields {
			w.Key(f.key)
			if f.at == nil {
				w.B = append(w.B, "null"...)
				continue
			}
			w.B = appendValue(w.B, f.at(&list[i]))
		}
		w.Close('}')
	}
	return append(w.B, ']')
}

func (p *parser) requests() []Req {
	fields, out := reqLayout(), []Req{}
	for p.in.Array(); p.in.Item(); {
		var q Req
		if !p.in.Object() {
			continue
		}
		for key, ok := p.in.Key(); ok; key, ok = p.in.Key() {
			if !p.request(fields, key, &q) {
				p.in.Skip()
			}
		}
		out = append(out, q)
	}
	return out
}

func (p *parser) request(fields []reqField, key string, q *Req) bool {
	for _, f := range fields {
		if f.key == key && f.at != nil {
			p.value(f.at(q))
			return true
		}
	}
	return false
}
