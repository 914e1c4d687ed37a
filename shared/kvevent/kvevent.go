// Package kvevent owns the events by which a node tells which KV blocks it holds: stored and removed, with a sequence
// number that has no gaps and an epoch that changes when the node's cache starts empty. It is pure: the codec of the JSON
// form, which is that of TensorRT-LLM's /kv_cache_events plus the epoch. It moves no events.
//
//	{"event_id":7,"epoch":3,"data":{"type":"stored","parent_hash":11,"blocks":[{"block_hash":12,"tokens":[1,2]}]}}
//	{"event_id":8,"epoch":3,"data":{"type":"removed","block_hashes":[12]}}
package kvevent

import (
	"encoding/json"
	"errors"
	"fmt"

	"meridian.internal/shared/blockhash"
)

// Type of an event.
type Type string

// The types. Parse keeps others (TensorRT-LLM sends "created" and "updated"); who reads them may skip them.
const (
	Stored  Type = "stored"
	Removed Type = "removed"
)

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
}

// Block is one stored block.
type Block struct {
	Hash   blockhash.Hash `json:"block_hash"`
	Tokens []int32        `json:"tokens,omitempty"`
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
}

// MarshalJSON writes the form above.
func (e Event) MarshalJSON() ([]byte, error) {
	return json.Marshal(wire{ID: &e.Seq, Epoch: e.Epoch, Data: &data{e.Type, e.Parent, e.Blocks, e.Removed}})
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
}

// ParseSnapshot reads a snapshot.
func ParseSnapshot(b []byte) (Snapshot, error) {
	var s Snapshot
	if err := json.Unmarshal(b, &s); err != nil {
		return Snapshot{}, fmt.Errorf("%w: snapshot: %w", ErrInvalid, err)
	}
	if s.Seq < 0 {
		return Snapshot{}, fmt.Errorf("%w: snapshot with seq %d, want 0 or more", ErrInvalid, s.Seq)
	}
	return s, nil
}
