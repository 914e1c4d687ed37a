package engine

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/profile"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/kvevent"
)

// onDisk is a small device whose cached blocks go to a folder. Blocks of the simulated device hold the tokens whose KV they are.
func onDisk(t testing.TB, dir string, cfg Config, dev sim.Config) *rig {
	cfg.PrefixReuse, cfg.DiskKVDir = true, dir
	if cfg.DiskKVBytes == 0 {
		cfg.DiskKVBytes = 1 << 20
	}
	dev.TokensPerBlock, dev.KVBlocks, dev.Cost = 4, 16, sim.Cost{Step: 1e5}
	return newRig(t, cfg, dev)
}

// await waits until a condition holds that work beside the engine brings about: files are written in real time.
func await(t testing.TB, r *rig, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); ; {
		ok := false
		r.query(func() { ok = holds() })
		if ok {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute: %+v", what, r.pool.Stats())
		}
		time.Sleep(time.Millisecond)
	}
}

// fill runs a prompt of 24 tokens and waits until all that it caches is on disk.
func fill(t testing.TB, r *rig, seed int32) []int32 {
	t.Helper()
	res := r.run(request(24, seed, 6))
	await(t, r, "blocks on disk", func() bool { s := r.pool.Stats(); return s.Disk.Used >= 7 && len(r.tiers.out) == 0 })
	return res.ids
}

func TestBlocksOnDiskOutliveTheNode(t *testing.T) {
	dir := t.TempDir()
	r := onDisk(t, dir, Config{}, sim.Config{})
	want := fill(t, r, 1)
	r.stop()

	var events []kvevent.Event
	r = onDisk(t, dir, Config{KVEvents: func(ev kvevent.Event) { events = append(events, ev) }}, sim.Config{})
	if len(events) != 7 || events[0].Type != kvevent.Stored || events[0].Blocks[0].Tier != kvevent.Disk || events[0].Seq != 1 {
		t.Errorf("%d events at the start: %+v", len(events), events)
	}
	res := r.run(request(24, 1, 6))
	sameText(t, "from disk", res.ids, want)
	// 5 blocks: the last token of the prompt is always computed.
	if kv := res.done.Report.KV; kv.DiskBlocks != 5 || kv.ReusedBlocks != 5 || kv.MissedBlocks != 0 || res.done.Report.CachedTokens != 20 {
		t.Errorf("%+v, %d tokens cached, want 5 blocks from disk", kv, res.done.Report.CachedTokens)
	}
	r.stop()
	if last := events[len(events)-1]; last.Type != kvevent.Stored && last.Type != kvevent.Moved {
		t.Errorf("last event %+v", last)
	}
}

func TestBlocksOfAnotherModelAreRefused(t *testing.T) {
	dir := t.TempDir()
	r := onDisk(t, dir, Config{}, sim.Config{ModelHash: "a"})
	fill(t, r, 1)
	r.stop()
	r = onDisk(t, dir, Config{}, sim.Config{ModelHash: "b"})
	if s := r.pool.Stats(); s.Disk.Used != 0 {
		t.Errorf("%d blocks of another model were kept", s.Disk.Used)
	}
	if res := r.run(request(24, 1, 6)); res.done.Report.CachedTokens != 0 {
		t.Errorf("%d tokens cached", res.done.Report.CachedTokens)
	}
}

func TestACorruptDiskBlockIsComputed(t *testing.T) {
	dir := t.TempDir()
	r := onDisk(t, dir, Config{}, sim.Config{})
	want := fill(t, r, 1)
	r.stop()
	corrupt(t, dir, 2)
	r = onDisk(t, dir, Config{}, sim.Config{})
	res := r.run(request(24, 1, 6))
	sameText(t, "over a corrupt block", res.ids, want)
	r.stop()
	s := r.pool.Stats()
	if kv := res.done.Report.KV; s.Disk.Broken != 1 || kv.DiskBlocks+kv.MissedBlocks != 5 || kv.DiskBlocks == 5 {
		t.Errorf("%+v; %d broken, want 1", kv, s.Disk.Broken)
	}
}

// corrupt changes a byte of the nth block of a folder that is not empty.
func corrupt(t *testing.T, dir string, nth int) {
	t.Helper()
	at := filepath.Join(dir, "kv.blocks")
	b, err := os.ReadFile(at)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)*nth/7+1] ^= 4
	if err := os.WriteFile(at, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestAFullDiskStoresNothingAndServes(t *testing.T) {
	dir := t.TempDir()
	if err := os.Symlink("/dev/full", filepath.Join(dir, "kv.blocks")); err != nil {
		t.Fatal(err)
	}
	if _, err := os.OpenFile("/dev/full", os.O_RDWR, 0); err != nil {
		t.Skipf("no /dev/full: %v", err)
	}
	r := onDisk(t, dir, Config{}, sim.Config{})
	want := r.run(request(24, 1, 6)).ids
	await(t, r, "the first failure", func() bool { return r.tiers.diskFailed > 0 && len(r.tiers.out) == 0 })
	r.run(request(40, 2, 20)) // evicts it
	res := r.run(request(24, 1, 6))
	sameText(t, "with a full disk", res.ids, want)
	if s := r.pool.Stats(); s.Disk.Used != 0 || s.Disk.Stored != 0 {
		t.Errorf("%+v: a full disk stored something", s.Disk)
	}
	if n := r.tiers.diskFailed; n > maxOffloads {
		t.Errorf("%d writes were tried, want a pause after those in flight", n)
	}
}

// TestANodeThatIsKilledDuringAnOffloadStartsAgain leaves files as they are at a random moment, which is all that a kill does to them.
func TestANodeThatIsKilledDuringAnOffloadStartsAgain(t *testing.T) {
	for name, windows := range map[string][]int{"all tokens are seen": nil, "windows too": {0, 8}, "windows alone": {8, 8}} {
		t.Run(name, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(3, 4))
			dir := t.TempDir()
			dev := sim.Config{Windows: windows, Layers: len(windows)}
			r := onDisk(t, dir, Config{DiskKVBytes: 8 << 10}, dev)
			texts := map[int32][]int32{}
			for range 60 {
				seed := rng.Int32N(6)
				res := r.run(request(24, seed, 6))
				if want, ok := texts[seed]; ok {
					sameText(t, "after a kill", res.ids, want)
				}
				texts[seed] = res.ids
				if rng.IntN(3) > 0 {
					continue
				}
				left := t.TempDir()
				if err := os.CopyFS(left, os.DirFS(dir)); err != nil { // while blocks are being written
					t.Fatal(err)
				}
				r.stop()
				r = onDisk(t, left, Config{DiskKVBytes: 8 << 10}, dev)
				dir = left
			}
			if err := r.Check(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestWindowsOnDiskOutliveTheNode: a prefix is of use only if the disk has what all its windows see from its end.
func TestWindowsOnDiskOutliveTheNode(t *testing.T) {
	for name, windows := range map[string][]int{"some layers": {0, 8}, "two sizes": {0, 8, 14}, "all layers": {8, 8}, "all layers, two sizes": {8, 14}} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			dev := sim.Config{Windows: windows, Layers: len(windows)}
			stored := func(r *rig) func() bool {
				last := int64(-1)
				return func() bool { // twice nothing is in flight, and nothing came in between: there is no more
					n := r.pool.Stats().Disk.Stored
					for _, w := range r.pool.Windows() {
						n += w.Stats().Disk.Stored
					}
					all := n == last && len(r.tiers.out) == 0
					last = n
					return all && r.pool.Stats().Disk.Used >= 7
				}
			}
			r := onDisk(t, dir, Config{}, dev)
			want := r.run(request(24, 1, 6)).ids
			await(t, r, "blocks on disk", stored(r))
			r.stop()
			r = onDisk(t, dir, Config{}, dev)
			res := r.run(request(24, 1, 6))
			sameText(t, "from disk", res.ids, want)
			kv, loaded := res.done.Report.KV, int64(0)
			for _, w := range r.pool.Windows() {
				loaded += w.Stats().Disk.Loaded
			}
			if res.done.Report.CachedTokens != 20 || kv.DiskBlocks == 0 || kv.MissedBlocks != 0 || loaded == 0 {
				t.Errorf("%+v, %d tokens cached, %d blocks of windows loaded; want 20 tokens from disk", kv, res.done.Report.CachedTokens, loaded)
			}
			r.stop()

			lost := filepath.Join(dir, "window-8")
			if err := os.RemoveAll(lost); err != nil {
				t.Fatal(err)
			}
			r = onDisk(t, dir, Config{}, dev)
			res = r.run(request(24, 1, 6))
			sameText(t, "without a window's files", res.ids, want)
			if n := res.done.Report.CachedTokens; n != 0 {
				t.Errorf("%d tokens cached though a window has lost its blocks", n)
			}
		})
	}
}

func TestAnEngineThatIsNotMadeLeavesTheDiskToOthers(t *testing.T) {
	now := func() int64 { return time.Now().UnixNano() }
	b, err := sim.New(sim.Config{TokensPerBlock: 4, KVBlocks: 16, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	cfg := Config{Now: now, PrefixReuse: true, DiskKVDir: t.TempDir(), DiskKVBytes: 1 << 20, Profile: &profile.Options{Windows: "no ranges"}}
	if _, err := New(cfg, b); err == nil {
		t.Fatal("made with a profile window that makes no sense")
	}
	cfg.Profile = nil
	e, err := New(cfg, b)
	if err != nil {
		t.Fatal(err)
	}
	e.tiers.close()
}

func TestHostAndDiskServeTogether(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		dev := sim.Config{TokensPerBlock: 4, KVBlocks: 16, Cost: sim.Cost{Step: 1e5}}
		r := newRig(t, Config{PrefixReuse: true, HostKVBytes: 16 << 10, DiskKVDir: dir, DiskKVBytes: 64 << 10}, dev)
		defer r.stop()
		rng := rand.New(rand.NewPCG(1, 1))
		texts := map[int32][]int32{}
		host, disk := 0, 0
		for range 100 {
			seed := rng.Int32N(5)
			res := r.run(request(24, seed, 6))
			if want, ok := texts[seed]; ok {
				sameText(t, "from the tiers", res.ids, want)
			}
			texts[seed] = res.ids
			host, disk = host+res.done.Report.KV.HostBlocks, disk+res.done.Report.KV.DiskBlocks
		}
		if host == 0 || disk == 0 {
			t.Errorf("%d blocks from the host, %d from disk: the test proves nothing", host, disk)
		}
		r.stop()
		if s := r.pool.Stats(); int(s.Host.Loaded) != host || int(s.Disk.Loaded) != disk {
			t.Errorf("%+v, %+v; the requests have %d and %d", s.Host, s.Disk, host, disk)
		}
	})
}
