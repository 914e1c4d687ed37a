package main

import (
	"bufio"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"meridian.internal/router/timeline"
	"meridian.internal/router/traces"
	"meridian.internal/router/waterfall"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// envLines is how many lines the benchmarks of this file read. With 3,400,000 the file has 10 GB.
const envLines = "MERIDIAN_BENCH_LINES"

func benchLines(b *testing.B) int {
	b.Helper()
	text := os.Getenv(envLines)
	if text == "" {
		return 20_000
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		b.Fatalf("%s=%q: want a number of 1 or more", envLines, text)
	}
	return n
}

// benchFile writes n requests like the one of testdata, each with times and ids of its own.
func benchFile(b *testing.B, n int) string {
	b.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "request.json"))
	if err != nil {
		b.Fatal(err)
	}
	l, err := timeline.Parse(text[:len(text)-1])
	if err != nil {
		b.Fatal(err)
	}
	path := filepath.Join(b.TempDir(), "timeline-h-1-x-00000.jsonl")
	f, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	w := bufio.NewWriterSize(f, 1<<20)
	draw := rand.New(rand.NewPCG(1, 2))
	var line []byte
	for i := range n {
		l.RequestID, l.ClientRequestID = fmt.Sprintf("req-%024x", i), fmt.Sprintf("client-%d", i)
		l.WallNS += 1_000_000
		longer := draw.Int64N(1_000_000)
		at := draw.IntN(len(l.Spans))
		l.Spans[at].DurNS += longer // spans then overlap, and nothing sums up: that is for check, not for these
		*l.TTFTNS += longer / 8
		line = append(timeline.Append(line[:0], l), '\n')
		l.Spans[at].DurNS -= longer
		*l.TTFTNS -= longer / 8
		if _, err := w.Write(line); err != nil {
			b.Fatal(err)
		}
	}
	if err := w.Flush(); err != nil {
		b.Fatal(err)
	}
	return path
}

// BenchmarkSummary is what `timeline summary` takes a million requests.
func BenchmarkSummary(b *testing.B) {
	n := benchLines(b)
	f := files{File: []string{benchFile(b, n)}}
	for b.Loop() {
		s, err := sum(b.Context(), f, 5)
		if err != nil {
			b.Fatal(err)
		}
		if err := s.Result().Write(io.Discard, false); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(b.Elapsed().Seconds()/float64(b.N)/float64(n)*1e6, "s/million")
}

// BenchmarkFind finds one request in a file that has an index, as `timeline show` and /timelines/{id} do.
func BenchmarkFind(b *testing.B) {
	n := benchLines(b)
	path := benchFile(b, n)
	if err := traces.Seal(path, false); err != nil {
		b.Fatal(err)
	}
	draw := rand.New(rand.NewPCG(3, 4))
	b.Run("show", func(b *testing.B) {
		for b.Loop() {
			s, err := traces.Open([]string{path})
			if err != nil {
				b.Fatal(err)
			}
			if l, err := s.Find(b.Context(), fmt.Sprintf("client-%d", draw.IntN(n))); l == nil || err != nil {
				b.Fatal(l, err)
			}
		}
	})
	b.Run("router", func(b *testing.B) {
		for b.Loop() {
			if line, err := traces.Lookup(filepath.Dir(path), fmt.Sprintf("req-%024x", draw.IntN(n))); line == nil || err != nil {
				b.Fatal(line, err)
			}
		}
	})
}

// BenchmarkLongRequest is the way of a request of 4,000 steps: its records are merged, its line is written to a file, and
// `timeline show` finds, reads and draws it.
func BenchmarkLongRequest(b *testing.B) {
	text, err := os.ReadFile(filepath.Join("testdata", "request.json"))
	if err != nil {
		b.Fatal(err)
	}
	l, err := timeline.Parse(text[:len(text)-1])
	if err != nil {
		b.Fatal(err)
	}
	var parts []timeline.Part
	for i := range l.Phases {
		p := l.Part(&l.Phases[i])
		if l.Phases[i].Role == phase.Gen {
			p.Steps = longSteps(*p.Record.Stamps.FirstTokenNS)
			p.Record.StepMessages = 1
			*p.Record.Stamps.LastTokenNS = p.Steps.TokenNS[len(p.Steps.TokenNS)-1]
		}
		parts = append(parts, p)
	}
	path := filepath.Join(b.TempDir(), "timeline-h-1-x-00000.jsonl")
	var line []byte
	for b.Loop() {
		line = append(timeline.Append(line[:0], timeline.Merge(parts, timeline.Clocks{})), '\n')
		if err := os.WriteFile(path, line, 0o600); err != nil {
			b.Fatal(err)
		}
		s, err := traces.Open([]string{path})
		if err != nil {
			b.Fatal(err)
		}
		found, err := s.Find(b.Context(), l.RequestID)
		if err != nil || found == nil || found.Decode == nil || found.Decode.Steps != longRequest {
			b.Fatal(found, err)
		}
		if err := waterfall.Render(io.Discard, found, waterfall.Options{Width: 100}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(len(line)), "B/line")
}

const longRequest = 4000 // steps

// longSteps are steps of 2 ms, of which the first begins at ns.
func longSteps(ns int64) *infer.Steps {
	st := new(infer.Steps)
	for i := range longRequest {
		const step, forward, sample = 2_000_000, 1_000_003, 9_001
		at := ns + int64(i)*step
		st.Step, st.Iter = append(st.Step, int32(i)), append(st.Iter, int64(i+90))
		st.ForwardStartNS, st.ForwardEndNS = append(st.ForwardStartNS, at), append(st.ForwardEndNS, at+forward)
		st.SampleEndNS, st.TokenNS = append(st.SampleEndNS, at+forward+sample), append(st.TokenNS, at+forward+2*sample)
		st.KVTokens, st.BatchSize = append(st.KVTokens, int32(i+700)), append(st.BatchSize, 3)
	}
	return st
}
