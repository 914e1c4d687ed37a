package clock

import (
	"encoding/json"
	"errors"
	"reflect"
	"testing"
)

func published() Published {
	return Published{Router: "r0", Node: "gen-0", By: "cs", Lower: &Constraint{1, 2}, Upper: &Constraint{3, 4}, Estimate: Estimate{
		Reference: idR, Local: idN, OffsetNS: -5, SkewPPB: 6, SkewErrPPB: 7, EtaPPBPerS: 8, LowerNS: -9, UpperNS: 10, AtNS: 11,
		ValidFromNS: 12, VoidAfterNS: 13, Seq: 14, State: Synced, Transport: "udp", Via: "cs", RTTNS: 15, Samples: 16,
	}}
}

func TestAPublishedEstimateSurvivesARoundTrip(t *testing.T) {
	b, err := json.Marshal(published())
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParsePublished(b)
	if err != nil || !reflect.DeepEqual(got, published()) {
		t.Errorf("%+v %v from %s", got, err, b)
	}
}

func TestBadEstimatesAreRefused(t *testing.T) {
	for name, spoil := range map[string]func(*Published){
		"no node":                   func(p *Published) { p.Node = "" },
		"no reference":              func(p *Published) { p.Reference = "" },
		"a malformed local clock":   func(p *Published) { p.Local = "x" },
		"bounds that are reversed":  func(p *Published) { p.LowerNS = 11 },
		"an offset outside":         func(p *Published) { p.OffsetNS = 11 },
		"a negative growth of skew": func(p *Published) { p.SkewErrPPB = -1 },
	} {
		p := published()
		spoil(&p)
		b, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := ParsePublished(b); !errors.Is(err, ErrBadEstimate) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func FuzzParsePublished(f *testing.F) {
	b, _ := json.Marshal(published())
	f.Add(b)
	f.Add([]byte(`{"node":"x"}`))
	f.Add([]byte(`null`))
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := ParsePublished(b)
		if err != nil {
			if !errors.Is(err, ErrBadEstimate) {
				t.Fatalf("undocumented error %v", err)
			}
			return
		}
		if _, bound, ok := p.Convert(p.AtNS); ok && bound < 0 {
			t.Fatalf("negative bound %d of %s", bound, b)
		}
	})
}
