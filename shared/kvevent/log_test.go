package kvevent

import (
	"encoding/json"
	"errors"
	"reflect"
	"testing"

	"meridian.internal/shared/blockhash"
)

func TestLogFollowsACache(t *testing.T) {
	l := NewLog(5)
	l.Add(Event{Seq: 1, Epoch: 5, Type: Stored, Blocks: []Block{{7, []int32{1}}, {8, nil}}})
	l.Add(Event{Seq: 2, Epoch: 5, Type: Removed, Removed: []blockhash.Hash{7}})
	if got, want := l.Snapshot(), (Snapshot{5, 2, []blockhash.Hash{8}}); !reflect.DeepEqual(got, want) {
		t.Errorf("snapshot %+v, want %+v", got, want)
	}
	got, left := l.Take(nil, 1)
	want := []Event{{Seq: 1, Epoch: 5, Type: Stored, Blocks: []Block{{Hash: 7}, {Hash: 8}}}}
	if !reflect.DeepEqual(got, want) || left != 1 {
		t.Errorf("took %+v and left %d, want %+v and 1", got, left, want)
	}
	if got, left := l.Take(nil, 9); len(got) != 1 || got[0].Seq != 2 || left != 0 {
		t.Errorf("took %+v and left %d, want event 2 and none left", got, left)
	}
}

func TestALogThatNobodyReadsStaysSmall(t *testing.T) {
	l := NewLog(1)
	for i := range int64(maxPending + 10) {
		l.Add(Event{Seq: i + 1, Epoch: 1, Type: Removed, Removed: []blockhash.Hash{1}})
	}
	if n := l.Taken(); n != maxPending {
		t.Errorf("taken up to %d, want %d: what is dropped counts", n, maxPending)
	}
	got, _ := l.Take(nil, 1<<20)
	if len(got) != 10 || got[0].Seq != maxPending+1 || l.Taken() != maxPending+10 {
		t.Errorf("%d events from %d on, taken up to %d", len(got), got[0].Seq, l.Taken())
	}
}

func FuzzParseSnapshot(f *testing.F) {
	f.Add(`{"epoch":3,"seq":9,"blocks":[1,18446744073709551615]}`)
	f.Add(`{}`)
	f.Fuzz(func(t *testing.T, in string) {
		s, err := ParseSnapshot([]byte(in))
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("error %v is not ErrInvalid", err)
			}
			return
		}
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if again, err := ParseSnapshot(b); err != nil || again.Seq != s.Seq || len(again.Blocks) != len(s.Blocks) {
			t.Fatalf("%s does not survive: %+v, %v", b, again, err)
		}
	})
}
