package ledger

import (
	"encoding/json"
	"net/http"
	"testing"

	"meridian.internal/shared/rows"
)

// asked is what GET /kv_stats of the ledger answers.
func asked(t *testing.T, l *Ledger) string {
	t.Helper()
	w := get(l, "/kv_stats", "")
	if w.Code != http.StatusOK || !json.Valid(w.Body.Bytes()) {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	return w.Body.String()
}

func TestKVStatsTellPoolsTiersHitsAndMoves(t *testing.T) {
	l := New(Options{Keep: 4, Sink: rows.Sink{Interval: 1}})
	err := l.Start(Engine{Ranks: 2, Static: rows.Static{TokensPerBlock: 32, BlockBytes: 7, Groups: []rows.Group{{BlockBytes: 7}, {Window: rows.Some(512), BlockBytes: 9}}}})
	if err != nil {
		t.Fatal(err)
	}
	some := rows.Some[int]
	full := rows.KV{Max: 10, Used: 3, Evictable: 2, SecondaryMax: some(20), SecondaryUsed: some(4), SecondaryEvictable: some(1)}
	window := rows.KV{Max: 5, Used: 1}
	row := func(rank int64) *rows.Row {
		return &rows.Row{
			Rank: rank, Sums: rows.Sums{Prompt: 100, Cached: 60, CachedDevice: 30, CachedHost: some(20), CachedDisk: some(10)}, Groups: []rows.KV{full, window},
			KV: rows.KV{
				Sampled: true, Max: 15, DFullReused: 2, DPartialReused: 1, DMissed: 4, OnboardBytes: some(70), OffloadBytes: some(140), IntraCopyBytes: some(9),
				HostDropped: some(3), DiskMax: some(30), DiskUsed: some(6), DiskLoaded: some(1), DiskStored: some(5), DiskDropped: some(8), DiskBroken: some(2),
			},
		}
	}
	l.Put(row(0))
	l.Put(row(0))
	const groups = `"groups":[{"window_tokens":null,"block_bytes":7,"max_blocks":10,"used_blocks":5,"evictable_blocks":2,"host":{"max_blocks":20,"used_blocks":4,"evictable_blocks":1}},` +
		`{"window_tokens":512,"block_bytes":9,"max_blocks":5,"used_blocks":1,"evictable_blocks":0,"host":null}],"disk":{"max_blocks":30,"used_blocks":6,"evictable_blocks":null}`
	const want = `{"enabled":true,"tokens_per_block":32,"ranks":[{` + groups + `,"prompt_tokens":200,"hit_tokens":{"device":60,"host":40,"disk":20},"full_blocks":4,"partial_blocks":2,"missed_blocks":8,` +
		`"moved":{"copied_bytes":18,"onboard_bytes":140,"offload_bytes":280,"host_dropped_blocks":6,"disk_loaded_blocks":2,"disk_stored_blocks":10,"disk_dropped_blocks":16,"disk_broken_blocks":4}},` +
		`{"groups":null,"disk":null,"prompt_tokens":0,"hit_tokens":{"device":0,"host":null,"disk":null},"full_blocks":0,"partial_blocks":0,"missed_blocks":0,` +
		`"moved":{"copied_bytes":0,"onboard_bytes":0,"offload_bytes":0,"host_dropped_blocks":0,"disk_loaded_blocks":0,"disk_stored_blocks":0,"disk_dropped_blocks":0,"disk_broken_blocks":0}}]}` + "\n"
	if got := asked(t, l); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	off := New(Options{})
	if err := off.Start(Engine{}); err != nil {
		t.Fatal(err)
	}
	if got := asked(t, off); got != `{"enabled":false,"tokens_per_block":0,"ranks":[]}`+"\n" {
		t.Errorf("a node that counts nothing: %s", got)
	}
}
