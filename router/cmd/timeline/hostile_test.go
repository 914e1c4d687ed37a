package main

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"meridian.internal/router/chart"
	"meridian.internal/router/check"
	"meridian.internal/router/export"
	"meridian.internal/router/rowcheck"
	"meridian.internal/router/summary"
	"meridian.internal/router/timeline"
	"meridian.internal/router/waterfall"
)

// FuzzTools gives every tool whatever can be read as a line: none may crash or go on for ever, and what they say is their own.
func FuzzTools(f *testing.F) {
	text, err := os.ReadFile(filepath.Join("testdata", "request.json"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	for _, line := range []string{
		`{"request_id":"<img src=x>","client_request_id":"a\nb","outcome":"finished","ttft_ns":-5,"e2e_ns":9223372036854775807,"spans":{"name":["p\u001b[1m"],"node":["n\u0007"],"dur_ns":[9223372036854775807],"gap_ns":[9223372036854775807]}}`,
		`{"outcome":"finished","start_ns":-9223372036854775808,"ttft_ns":1,"e2e_ns":1,"spans":{"name":["prefill_wait","prefill"],"node":[0,"a>b"],"dur_ns":[9223372036854775807,-9223372036854775808],"gap_ns":[-9,7],"bound_ns":[9223372036854775807]}}`,
		`{"outcome":"finished","ttft_ns":9223372036854775807,"e2e_ns":0,"tokens":{"output":2},"handover":{"dur_ns":0,"hidden_ns":-1},"decode":{"steps":-1},"violations":[{}],"resumes":[{"tokens":-1}]}`,
		`{"phases":[{"role":"gen","clock":["a.b","synced",-1,9223372036854775807,null,9223372036854775807,-5],"stamps_ns":[9223372036854775807,-1],"steps":{"iter":[1,1],"forward_start_ns":[5,-9223372036854775808],"forward_end_ns":[1,2],"sample_end_ns":[9223372036854775807,0],"token_ns":[-1,9223372036854775807],"batch_size":[-1,9223372036854775807]}}]}`,
	} {
		f.Add([]byte(`{"schema":"meridian.timeline/1",` + line[1:]))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := timeline.Parse(b)
		if err != nil {
			return
		}
		oneLine(l)
		sums := summary.New(3)
		sums.Add(l)
		check.New().Line(l, "f:1")
		ledgers := rowcheck.New()
		ledgers.Timeline(l)
		ledgers.Finish()
		var d chart.Data
		d.Add(l)
		for _, err := range []error{
			waterfall.Render(io.Discard, l, waterfall.Options{Color: true}), sums.Result().Write(io.Discard, true),
			summary.WriteDiff(io.Discard, summary.Diff(sums, summary.New(0)), false), summary.WriteAdvice(io.Discard, sums.Advise(), false),
		} {
			if err != nil {
				t.Error(err)
			}
		}
		for _, kind := range chart.Kinds() {
			_ = d.Draw(io.Discard, kind, "svg") // what cannot be drawn is an error
		}
		for _, format := range export.Formats() {
			x, err := export.New(format, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			if err := x.Line(l); err != nil {
				t.Errorf("%s: %v", format, err)
			}
			if err := x.Close(); err != nil {
				t.Errorf("%s: %v", format, err)
			}
		}
	})
}
