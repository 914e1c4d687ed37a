package proxy

import (
	"strings"
	"sync"
	"testing"

	"meridian.internal/shared/clock"
)

func TestMintedIDs(t *testing.T) {
	steady, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	m := newMinter("r0", steady)
	const each, workers = 5000, 4
	ids := make([][]int64, workers)
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			for range each {
				ids[w] = append(ids[w], m.next())
			}
		})
	}
	all.Wait()
	seen := map[int64]bool{}
	for _, list := range ids {
		for i, id := range list {
			if id < 1<<40 || seen[id] {
				t.Fatalf("id %d is a repetition or outside [2^40, 2^63)", id)
			}
			if i > 0 && id <= list[i-1] {
				t.Fatalf("ids do not rise: %d after %d", id, list[i-1])
			}
			seen[id] = true
		}
	}
}

func TestValidID(t *testing.T) {
	for s, want := range map[string]bool{
		"a": true, "req-1_2.3:4/5+6=7@8": true, strings.Repeat("x", 128): true,
		"": false, strings.Repeat("x", 129): false, "a b": false, "a\n": false, "é": false, "<a>": false, `"`: false, "a,b": false,
	} {
		if validID(s) != want {
			t.Errorf("%q: got %v", s, !want)
		}
	}
	if a, b := mintRequestID(), mintRequestID(); a == b || !validID(a) {
		t.Errorf("minted %q and %q", a, b)
	}
}

func TestValidTraceparent(t *testing.T) {
	good := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for s, want := range map[string]bool{
		good: true, "": false, good + "0": false, strings.ToUpper(good): false, strings.Replace(good, "-", "_", 1): false, good[:54] + "\n": false,
	} {
		if validTraceparent(s) != want {
			t.Errorf("%q: got %v", s, !want)
		}
	}
}

func FuzzValidID(f *testing.F) {
	f.Add("req-1")
	f.Add("a\r\nSet-Cookie: x")
	f.Fuzz(func(t *testing.T, s string) {
		if validID(s) && strings.ContainsAny(s, "\r\n\"<>\\ \x00") {
			t.Errorf("%q is accepted", s)
		}
	})
}
