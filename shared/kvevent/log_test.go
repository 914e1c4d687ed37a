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
	l.Add(Event{Seq: 1, Epoch: 5, Type: Stored, Blocks: []Block{{7, Device, []int32{1}}, {8, Device, nil}}})
	l.Add(Event{Seq: 2, Epoch: 5, Type: Removed, Removed: []blockhash.Hash{7}})
	l.Add(Event{Seq: 3, Epoch: 5, Type: Moved, Moved: &Move{8, Device, Host}})
	if got, want := l.Snapshot(), (Snapshot{5, 3, []blockhash.Hash{8}, []Tier{Host}}); !reflect.DeepEqual(got, want) {
		t.Errorf("snapshot %+v, want %+v", got, want)
	}
	p := l.Read(0, 2)
	if len(p.Events) != 2 || p.Events[1].Seq != 2 || p.Next != 2 || p.Oldest != 1 || p.Newest != 3 || p.Dropped != 0 || p.Epoch != 5 {
		t.Errorf("first page %+v", p)
	}
	if again := l.Read(0, 2); !reflect.DeepEqual(again, p) {
		t.Errorf("reading took something away: %+v, then %+v", p, again)
	}
	if p := l.Read(2, 9); len(p.Events) != 1 || p.Events[0].Seq != 3 || p.Next != 3 {
		t.Errorf("last page %+v", p)
	}
	if p := l.Read(9, 9); len(p.Events) != 0 || p.Next != 9 || p.Newest != 3 {
		t.Errorf("page of a cursor that is ahead %+v", p)
	}
}

func TestWhoIsTooFarBehindIsTold(t *testing.T) {
	l := NewLog(1)
	for i := range int64(maxKept + 10) {
		l.Add(Event{Seq: i + 1, Epoch: 1, Type: Removed, Removed: []blockhash.Hash{1}})
	}
	p := l.Read(3, 5)
	if p.Dropped != 7 || p.Oldest != 11 || len(p.Events) != 5 || p.Events[0].Seq != 11 || p.Next != 15 {
		t.Errorf("dropped %d, oldest %d, %d events, next %d", p.Dropped, p.Oldest, len(p.Events), p.Next)
	}
	if p := l.Read(maxKept+9, 5); p.Dropped != 0 || len(p.Events) != 1 || p.Events[0].Seq != maxKept+10 {
		t.Errorf("%+v", p)
	}
}

func TestAFollowerIsWokenByEventsAndByTheEnd(t *testing.T) {
	l := NewLog(1)
	woken := func(after int64) bool {
		select {
		case <-l.Changed(after):
			return true
		default:
			return false
		}
	}
	waiting := l.Changed(0)
	if woken(0) {
		t.Error("woken by nothing")
	}
	l.Add(Event{Seq: 1, Type: Removed})
	if _, open := <-waiting; open || !woken(0) || woken(1) {
		t.Error("an event wakes those that are before it, and no others")
	}
	if l.Close(); !woken(1) || !l.Closed() {
		t.Error("the end wakes nobody")
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
