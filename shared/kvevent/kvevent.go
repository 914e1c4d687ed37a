// Package kvevent owns the events by which a node tells which KV blocks it holds and in which tier of memory: stored, moved
// and removed, with a sequence number that has no gaps and an epoch that changes when the node's cache starts anew. It is pure:
// the codec of the JSON form, which is that of TensorRT-LLM's /kv_cache_events plus the epoch, and the log of one cache. It
// moves no events.
//
//	{"event_id":7,"epoch":3,"data":{"type":"stored","parent_hash":11,"blocks":[{"block_hash":12,"cache_level":0,"tokens":[1,2]}]}}
//	{"event_id":8,"epoch":3,"data":{"type":"updated","block_hash":12,"cache_level":{"type":"event_diff","old_value":0,"new_value":1}}}
//	{"event_id":9,"epoch":3,"data":{"type":"removed","block_hashes":[12]}}
package kvevent

import (
	"encoding/json"
	"errors"
	"fmt"

	"meridian.internal/shared/blockhash"
)

// Type of an event.
type Type string

// The types. Parse keeps others (TensorRT-LLM sends "created"); who reads them may skip them.
const (
	Stored  Type = "stored"
	Moved   Type = "updated" // from one tier to another
	Removed Type = "removed" // from the last tier that had it
)

// Tier is a level of memory, the fastest first.
type Tier int

// The tiers.
const (
	Device Tier = iota
	Host
	Disk
	Tiers int = iota // how many there are
)

// String names a tier.
func (t Tier) String() string {
	if t < 0 || int(t) >= Tiers {
		return fmt.Sprintf("tier %d", int(t))
	}
	return [...]string{"device", "host", "disk"}[t]
}

// ErrInvalid is returned when an event cannot be understood.
var ErrInvalid = errors.New("kvevent: invalid event")

// Event is one change of a node's cache.
type Event struct {
	Seq   int64 // event_id: 1, 2, 3 … within an epoch
	Epoch int64 // 0 when the sender has none
	Type  Type
	// Parent is the hash before the first of Stored blocks, nil where unknown or where they begin a prefix of a sender
	// that does not say.
	Parent  *blockhash.Hash
	Blocks  []Block          // of Stored
	Removed []blockhash.Hash // of Removed
	Moved   *Move            // of Moved
}

// Block is one stored block.
type Block struct {
	Hash   blockhash.Hash `json:"block_hash"`
	Tier   Tier           `json:"cache_level"`
	Tokens []int32        `json:"tokens,omitempty"`
}

// Move is a block whose fastest tier is another one now.
type Move struct {
	Hash     blockhash.Hash
	From, To Tier
}

type wire struct {
	ID    *int64 `json:"event_id,omitempty"`
	OldID *int64 `json:"id,omitempty"`
	Epoch int64  `json:"epoch,omitempty"`
	Data  *data  `json:"data,omitempty"`
}

type data struct {
	Type   Type             `json:"type"`
	Parent *blockhash.Hash  `json:"parent_hash,omitempty"`
	Blocks []Block          `json:"blocks,omitempty"`
	Hashes []blockhash.Hash `json:"block_hashes,omitempty"`
	Hash   *blockhash.Hash  `json:"block_hash,omitempty"`
	Level  *diff            `json:"cache_level,omitempty"`
}

// diff is TensorRT-LLM's form of a change. It may change something else than the tier, in which case there is none.
type diff struct {
	Type string `json:"type"`
	Old  Tier   `json:"old_value"`
	New  Tier   `json:"new_value"`
}

// MarshalJSON writes the form above.
func (e Event) MarshalJSON() ([]byte, error) {
	d := data{Type: e.Type, Parent: e.Parent, Blocks: e.Blocks, Hashes: e.Removed}
	if m := e.Moved; m != nil {
		d.Hash, d.Level = &m.Hash, &diff{"event_diff", m.From, m.To}
	}
	return json.Marshal(wire{ID: &e.Seq, Epoch: e.Epoch, Data: &d})
}

// UnmarshalJSON also accepts "id" for "event_id", and a body without "data" around it, as TensorRT-LLM's router does.
func (e *Event) UnmarshalJSON(b []byte) error {
	var w wire
	if err := json.Unmarshal(b, &w); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if w.Data == nil {
		w.Data = &data{}
		if err := json.Unmarshal(b, w.Data); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	*e = Event{Epoch: w.Epoch, Type: w.Data.Type, Parent: w.Data.Parent, Blocks: w.Data.Blocks, Removed: w.Data.Hashes}
	if w.Data.Hash != nil && w.Data.Level != nil {
		e.Moved = &Move{*w.Data.Hash, w.Data.Level.Old, w.Data.Level.New}
	}
	switch {
	case w.ID != nil:
		e.Seq = *w.ID
	case w.OldID != nil:
		e.Seq = *w.OldID
	}
	if e.Type == "" {
		return fmt.Errorf(`%w: no "type"`, ErrInvalid)
	}
	return nil
}

// ParseList reads the answer of /kv_cache_events: a JSON array of events.
func ParseList(b []byte) ([]Event, error) {
	var list []Event
	if err := json.Unmarshal(b, &list); err != nil {
		if errors.Is(err, ErrInvalid) {
			return nil, err
		}
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	return list, nil
}

// Snapshot is what a cache held after event Seq.
type Snapshot struct {
	Epoch  int64            `json:"epoch"`
	Seq    int64            `json:"seq"` // 0: no event yet
	Blocks []blockhash.Hash `json:"blocks"`
	Tiers  []Tier           `json:"cache_levels,omitempty"` // of each block; empty: not known
}

// ParseSnapshot reads a snapshot.
func ParseSnapshot(b []byte) (Snapshot, error) {
	var s Snapshot
	if err := json.Unmarshal(b, &s); err != nil {
		return Snapshot{}, fmt.Errorf("%w: snapshot: %w", ErrInvalid, err)
	}
	if len(s.Tiers) > 0 && len(s.Tiers) != len(s.Blocks) {
		return Snapshot{}, fmt.Errorf("%w: snapshot with %d blocks and %d cache_levels", ErrInvalid, len(s.Blocks), len(s.Tiers))
	}
	if s.Seq < 0 {
		return Snapshot{}, fmt.Errorf("%w: snapshot with seq %d, want 0 or more", ErrInvalid, s.Seq)
	}
	return s, nil
}
