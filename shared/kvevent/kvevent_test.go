package kvevent

import (
	"encoding/json"
	"errors"
	"reflect"
	"testing"

	"meridian.internal/shared/blockhash"
)

func hash(v blockhash.Hash) *blockhash.Hash { return &v }

func TestEventHasTheDocumentedForm(t *testing.T) {
	tests := []struct {
		name  string
		event Event
		json  string
	}{
		{"stored", Event{Seq: 7, Epoch: 3, Type: Stored, Parent: hash(11), Blocks: []Block{{12, Device, []int32{1, 2}}, {1<<64 - 1, Disk, nil}}},
			`{"event_id":7,"epoch":3,"data":{"type":"stored","parent_hash":11,"blocks":[{"block_hash":12,"cache_level":0,"tokens":[1,2]},{"block_hash":18446744073709551615,"cache_level":2}]}}`},
		{"moved", Event{Seq: 9, Epoch: 5, Type: Moved, Moved: &Move{14, Host, Disk}},
			`{"event_id":9,"epoch":5,"data":{"type":"updated","block_hash":14,"cache_level":{"type":"event_diff","old_value":1,"new_value":2}}}`},
		{"removed", Event{Seq: 8, Epoch: 4, Type: Removed, Removed: []blockhash.Hash{12, 13}},
			`{"event_id":8,"epoch":4,"data":{"type":"removed","block_hashes":[12,13]}}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b, err := json.Marshal(tt.event)
			if err != nil || string(b) != tt.json {
				t.Errorf("wrote %s, error %v\nwant  %s", b, err, tt.json)
			}
			var back Event
			if err := json.Unmarshal([]byte(tt.json), &back); err != nil || !reflect.DeepEqual(back, tt.event) {
				t.Errorf("read %+v, error %v, want %+v", back, err, tt.event)
			}
		})
	}
}

func TestForeignFormsAreRead(t *testing.T) {
	tests := []struct {
		name, json string
		want       Event
	}{
		{"id for event_id", `{"id":5,"data":{"type":"removed","block_hashes":[1]}}`, Event{Seq: 5, Type: Removed, Removed: []blockhash.Hash{1}}},
		{"a bare body", `{"type":"stored","blocks":[{"block_hash":9,"cache_level":0}]}`, Event{Type: Stored, Blocks: []Block{{Hash: 9}}}},
		{"a change of something else", `{"event_id":2,"data":{"type":"updated","block_hash":3,"priority":{"type":"event_diff","old_value":1,"new_value":2}}}`, Event{Seq: 2, Type: Moved}},
		{"another type", `{"event_id":1,"data":{"type":"created","num_blocks_per_cache_level":[3]}}`, Event{Seq: 1, Type: "created"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var e Event
			if err := json.Unmarshal([]byte(tt.json), &e); err != nil || !reflect.DeepEqual(e, tt.want) {
				t.Errorf("read %+v, error %v, want %+v", e, err, tt.want)
			}
		})
	}
}

func TestBadListsAreRefused(t *testing.T) {
	for _, in := range []string{``, `{`, `{}`, `[1]`, `[{}]`, `[{"data":{}}]`, `[{"data":{"type":"stored","blocks":[{"block_hash":-1}]}}]`, `[{"data":{"type":7}}]`} {
		if _, err := ParseList([]byte(in)); !errors.Is(err, ErrInvalid) {
			t.Errorf("ParseList(%s): error %v, want ErrInvalid", in, err)
		}
	}
	if list, err := ParseList([]byte(`[]`)); err != nil || len(list) != 0 {
		t.Errorf("ParseList([]) = %v, error %v", list, err)
	}
}

func FuzzParseList(f *testing.F) {
	f.Add(`[{"event_id":7,"epoch":3,"data":{"type":"stored","parent_hash":11,"blocks":[{"block_hash":12,"tokens":[1,2]}]}}]`)
	f.Add(`[{"id":8,"type":"removed","block_hashes":[12]}]`)
	f.Fuzz(func(t *testing.T, in string) {
		list, err := ParseList([]byte(in))
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("error %v is not ErrInvalid", err)
			}
			return
		}
		b, err := json.Marshal(list)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseList(b)
		if err != nil || len(again) != len(list) {
			t.Fatalf("%s does not survive: %v", b, err)
		}
	})
}
