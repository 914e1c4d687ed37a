package node

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
)

func fullReport() Report {
	return Report{
		Role: RoleGen, Name: "g", ClockID: clock.MakeID(1, 2), Seq: 3, KVEpoch: 4, KVSeq: 5,
		Load:  infer.Load{Running: 6, Waiting: 7, WaitingTokens: 8, KVUsedBlocks: 9, KVMaxBlocks: 10, Iter: 11},
		Ranks: []infer.Load{{Running: 12}, {Waiting: 13, WaitingTokens: 14, KVUsedBlocks: 15, KVMaxBlocks: 16}},
	}
}

func TestReportSurvivesARoundTrip(t *testing.T) {
	b, err := json.Marshal(fullReport())
	if err != nil {
		t.Fatal(err)
	}
	if got, err := ParseReport(b); err != nil || !reflect.DeepEqual(got, fullReport()) {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestBadReportsAreRefusedWithTheFieldNamed(t *testing.T) {
	for names, change := range map[string]func(*Report){
		`role "router"`: func(r *Report) { r.Role = RoleRouter },
		"name":          func(r *Report) { r.Name = strings.Repeat("x", 200) },
		"seq":           func(r *Report) { r.Seq = 0 },
		"kv_seq":        func(r *Report) { r.KVSeq = -1 },
		"count of -4":   func(r *Report) { r.Load.WaitingTokens = -4 },
		"count of -5":   func(r *Report) { r.Ranks[1].Running = -5 },
		"65 ranks":      func(r *Report) { r.Ranks = make([]infer.Load, 65) },
		"count of 2199": func(r *Report) { r.Load.KVMaxBlocks = 2 << 40 },
	} {
		r := fullReport()
		change(&r)
		if err := r.Check(); !errors.Is(err, ErrBadInfo) || !strings.Contains(err.Error(), names) {
			t.Errorf("error %v, want ErrBadInfo with %q", err, names)
		}
	}
}

func FuzzParseReport(f *testing.F) {
	b, err := json.Marshal(fullReport())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(b))
	f.Fuzz(func(t *testing.T, in string) {
		r, err := ParseReport([]byte(in))
		if err != nil {
			if !errors.Is(err, ErrBadInfo) {
				t.Fatalf("error %v is not ErrBadInfo", err)
			}
			return
		}
		b, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseReport(b)
		if err != nil {
			t.Fatal(err)
		}
		if c, err := json.Marshal(again); err != nil || string(c) != string(b) {
			t.Fatalf("%s does not survive: %s, %v", b, c, err)
		}
	})
}
