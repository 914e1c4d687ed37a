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

func full() Info {
	return Info{
		Name: "gen 0", Role: RoleGen, URL: "http://127.0.0.1:1", KVAddr: "h:2", ClockAddr: "h:3", ClockID: clock.MakeID(4, 5), PID: 6,
		State: Draining, Seq: 7, Version: "v", Styles: []string{"s"},
		Model: &Model{Name: "m", Hash: "h", ContextLen: 8, TokensPerBlock: 9, Numerics: "n", MaxBatchSize: 10},
		Load:  &infer.Load{Running: 11, Waiting: 12, WaitingTokens: 13, KVUsedBlocks: 14, KVMaxBlocks: 15, Iter: 16},
	}
}

func TestInfoSurvivesARoundTrip(t *testing.T) {
	b, err := json.Marshal(full())
	if err != nil {
		t.Fatal(err)
	}
	got, err := Parse(b)
	if err != nil || !reflect.DeepEqual(got, full()) {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestBadRegistrationsAreRefusedWithTheFieldNamed(t *testing.T) {
	cases := map[string]struct {
		change func(*Info)
		names  string
	}{
		"an unknown role":      {func(i *Info) { i.Role = "boss" }, `role "boss"`},
		"no name":              {func(i *Info) { i.Name = "" }, "name"},
		"a name without end":   {func(i *Info) { i.Name = strings.Repeat("x", 200) }, "name"},
		"no address":           {func(i *Info) { i.URL = "" }, "url"},
		"65 ranks":             {func(i *Info) { i.Ranks = make([]infer.Load, 65) }, "65 ranks"},
		"-1 stages":            {func(i *Info) { i.Stages = -1 }, "-1 stages"},
		"an address of a file": {func(i *Info) { i.URL = "file:///etc/passwd" }, "url"},
	}
	for name, c := range cases {
		i := full()
		c.change(&i)
		if err := i.Check(); !errors.Is(err, ErrBadInfo) || !strings.Contains(err.Error(), c.names) {
			t.Errorf("%s: error %v, want ErrBadInfo with %q", name, err, c.names)
		}
	}
}

func TestKeysOfDifferentNamesDiffer(t *testing.T) {
	if a, b := Key(RoleGen, "a.b"), Key(RoleGen, "a b"); a == b || strings.Count(a, ".") != 1 {
		t.Errorf("keys %q and %q", a, b)
	}
}

func FuzzParse(f *testing.F) {
	b, _ := json.Marshal(full())
	f.Add(b)
	f.Add([]byte(`{"name":"x","role":"ctx","url":"http://["}`))
	f.Add([]byte(`{"load":[]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		i, err := Parse(b)
		if err != nil {
			if !errors.Is(err, ErrBadInfo) {
				t.Errorf("error %v is not ErrBadInfo", err)
			}
			return
		}
		again, err := json.Marshal(i)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := Parse(again); err != nil || !reflect.DeepEqual(i, back) {
			t.Errorf("%+v came back as %+v, %v", i, back, err)
		}
	})
}
