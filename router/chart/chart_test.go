package chart

import (
	"bytes"
	"errors"
	"image/png"
	"strings"
	"testing"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

func line(i int) *timeline.Line {
	ttft, e2e := int64(1_000_000+i*1000), int64(9_000_000)
	return &timeline.Line{Outcome: phase.Finished, StartNS: int64(i) * 1e8, TTFTNS: &ttft, E2ENS: &e2e,
		Spans: []timeline.Span{{Name: "prefill", DurNS: 500_000}, {Name: "prefill_wait", DurNS: 100_000}, {Name: "ctx_queue", DurNS: int64(i) * 1000}}}
}

func TestEveryKindInEveryFormat(t *testing.T) {
	var d Data
	for i := range 50 {
		d.Add(line(i))
	}
	for _, kind := range Kinds() {
		for _, format := range []string{"svg", "png"} {
			var b bytes.Buffer
			if err := d.Draw(&b, kind, format); err != nil {
				t.Errorf("%s as %s: %v", kind, format, err)
				continue
			}
			if format == "png" {
				if _, err := png.Decode(&b); err != nil {
					t.Errorf("%s: %v", kind, err)
				}
			} else if !strings.Contains(b.String(), "50 requests") {
				t.Errorf("%s has no title", kind)
			}
		}
	}
}

func TestOneRequestCanBeDrawn(t *testing.T) {
	for _, kind := range Kinds() {
		var d Data
		d.Add(line(1))
		if err := d.Draw(&bytes.Buffer{}, kind, "svg"); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

func TestRequestsThatTookNoTimeCanBeDrawn(t *testing.T) {
	for _, kind := range Kinds() {
		var d Data
		zero := int64(0)
		d.Add(&timeline.Line{Outcome: phase.Finished, TTFTNS: &zero, E2ENS: &zero})
		if err := d.Draw(&bytes.Buffer{}, kind, "svg"); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
}

func TestWhatCannotBeDrawnIsNamed(t *testing.T) {
	var d Data
	if err := d.Draw(&bytes.Buffer{}, "cdf", "svg"); !errors.Is(err, ErrEmpty) {
		t.Errorf("nothing: %v", err)
	}
	failed := line(1)
	failed.Outcome = phase.Failed
	d.Add(failed)
	if len(d.sample) != 0 {
		t.Error("a failed request is drawn")
	}
	d.Add(line(1))
	if err := d.Draw(&bytes.Buffer{}, "pie", "svg"); !errors.Is(err, ErrKind) {
		t.Errorf("kind: %v", err)
	}
	if err := d.Draw(&bytes.Buffer{}, "cdf", "doc"); err == nil {
		t.Error("format doc is taken")
	}
}

func TestTheSampleIsBoundedAndSpread(t *testing.T) {
	var d Data
	for i := range 5 * maxSample {
		d.Add(line(i))
	}
	n := len(d.sample)
	if n >= maxSample || n < maxSample/4 || d.seen != 5*maxSample {
		t.Fatalf("%d of %d kept", n, d.seen)
	}
	if first, last := d.sample[0].start, d.sample[n-1].start; first > last/10 || last < int64(4*maxSample)*1e8 {
		t.Errorf("from %d to %d", first, last)
	}
}

func TestEverySpanBeforeTheFirstTokenBelongsToAGroup(t *testing.T) {
	for _, name := range timeline.SpanNames() {
		if strings.HasPrefix(name, "decode") || name == "finish" {
			continue
		}
		found := false
		for _, g := range groups {
			found = found || strings.Contains(g.spans, " "+name+" ")
		}
		if !found {
			t.Errorf("span %s belongs to no group", name)
		}
	}
}
