package rowcheck

import (
	"slices"

	"meridian.internal/shared/jsonline"
)

// The schemas of the lines that are no rows.
const (
	CountersSchema = "meridian.counters/1"
	LostSchema     = "meridian.lost/1"
)

// extra is a line that is no row; of a row it holds the schema only.
type extra struct {
	schema, node, clock string
	lost                int64
	counters            map[string]float64
}

// AppendCounters appends a line with counters of a node.
func AppendCounters(b []byte, node, clock string, counters map[string]float64) []byte {
	w := jsonline.Writer{B: b}
	w.Open('{')
	w.Str("schema", CountersSchema)
	w.Str("node", node)
	w.Str("clock_id", clock)
	w.OpenKey("counters", '{')
	var names []string
	for name := range counters {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		w.Float(name, counters[name])
	}
	w.Close('}')
	w.Close('}')
	return append(w.B, '\n')
}

// AppendLost appends a line that says how many rows of a node were gone before they could be read.
func AppendLost(b []byte, node, clock string, n int64) []byte {
	w := jsonline.Writer{B: b}
	w.Open('{')
	w.Str("schema", LostSchema)
	w.Str("node", node)
	w.Str("clock_id", clock)
	w.Int("lost", n)
	w.Close('}')
	return append(w.B, '\n')
}

// parseExtra reads a line that is no row. Of a row it reads the schema, which comes first.
func parseExtra(b []byte) (x extra, err error) {
	r := jsonline.NewReader(string(b))
	if !r.Object() {
		return x, r.End()
	}
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "schema":
			if x.schema = r.String(); x.schema != CountersSchema && x.schema != LostSchema {
				return x, r.Err()
			}
		case "node":
			x.node = r.String()
		case "clock_id":
			x.clock = r.String()
		case "lost":
			x.lost = r.Int()
		case "counters":
			x.counters = parseNumbers(r)
		default:
			r.Skip()
		}
	}
	return x, r.End()
}

func parseNumbers(r *jsonline.Reader) map[string]float64 {
	out := map[string]float64{}
	if r.Object() {
		for key, ok := r.Key(); ok; key, ok = r.Key() {
			out[key] = r.Float()
		}
	}
	return out
}
