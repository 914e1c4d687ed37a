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
