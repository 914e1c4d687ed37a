package timeline

import (
	"slices"
	"strings"

	"meridian.internal/shared/phase"
)

// pointNames are the stamps of a source: those of its record, of its transfer, and the ends of its chunks.
var pointNames = slices.Concat(stampNames[:], transferNames[:], []string{"chunk_start", "chunk_end"})

// Where what is not a stamp of phase.Stamps is in the points of a source.
const (
	transferPoint = phase.StampCount
	chunkPoint    = transferPoint + len(transferNames)
	pointCount    = chunkPoint + 2
)

// mark is a stamp of one of a chain's records.
type mark struct {
	who byte // as in stage
	at  int  // in the points of its source
}

// edge is an end of a span as text like "G.installed_ns|G.admitted_ns" names it.
type edge struct{ one, other []mark }

func parseEdge(text string) edge {
	one, other, _ := strings.Cut(text, "^")
	return edge{parseMarks(one), parseMarks(other)}
}

func parseMarks(text string) (list []mark) {
	for name := range strings.SplitSeq(text, "|") {
		if name == "" {
			continue
		}
		at := slices.Index(pointNames, name[2:])
		if at < 0 {
			panic("timeline: no stamp is named " + name)
		}
		list = append(list, mark{name[0], at})
	}
	return list
}

func compile(stages []stage) []stage {
	for i := range stages {
		stages[i].start, stages[i].end = parseEdge(stages[i].from), parseEdge(stages[i].to)
	}
	return stages
}

// convert places every stamp of the source, each once.
func (s *source) convert() {
	s.bound = 0
	for i, f := range s.Record.Stamps.All() {
		s.points[i] = s.stamp(*f.NS)
	}
	if t := s.Record.Transfer; t != nil {
		for i, ns := range [...]*int64{t.RequestedNS, t.StartNS, t.LastByteNS, t.InstalledNS} {
			s.points[transferPoint+i] = s.stamp(ns)
		}
	}
	if c := s.Record.Chunks; len(c) > 0 {
		s.points[chunkPoint], s.points[chunkPoint+1] = s.place(c[0].ForwardStartNS), s.place(c[len(c)-1].SampleEndNS)
	}
}
