package engine

import (
	"fmt"
	"math"
	"math/bits"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kv"
	"meridian.internal/gpu/kvdisk"
	"meridian.internal/shared/kvevent"
)

// tiers are the memories that keep KV blocks which the device may evict: host memory and files. Only the engine's goroutine
// uses them; device and file system read and write the bytes of a block while a move of it runs.
type tiers struct {
	block []int                  // bytes of a block of each group of layers in the canonical layout
	host  [][]byte               // of each group; empty: there is none
	disk  []*kvdisk.Files        // of each group; nil: there is none
	out   map[kv.Move]struct{}   // copies from the device in flight
	in    map[*Sequence]struct{} // sequences whose copies to the device are in flight
	// Writing to a disk that refuses is tried again then; what it has can be read meanwhile.
	diskAfterNS int64
	diskFailed  int64
}

const (
	// maxOffloads bounds the copies to a tier that run beside the work.
	maxOffloads = 4
	// diskPause is how long nothing is written after the disk has refused something: it may be full.
	diskPause = 10 * time.Second
)

// openTiers takes the host memory and the files for KV. Both are divided between the groups as the device's memory is.
func (e *Engine) openTiers() error {
	t := &e.tiers
	t.out, t.in = map[kv.Move]struct{}{}, map[*Sequence]struct{}{}
	device := int64(0) // bytes of all groups
	for g := range 1 + len(e.windows) {
		t.block = append(t.block, e.info.BlockBytes(g))
		device += int64(t.block[g]) * int64(e.info.GroupBlocks(g))
	}
	t.host = make([][]byte, len(t.block))
	if !e.cfg.PrefixReuse {
		return nil
	}
	for g, block := range t.block {
		n := share(e.cfg.HostKVBytes, e.info.GroupBlocks(g), device)
		if n == 0 || block == 0 {
			continue
		}
		var err error
		if t.host[g], err = hostMemory(n * block); err != nil {
			return err
		}
		e.pool.Group(g).AddTier(kvevent.Host, n, nil)
	}
	if e.cfg.DiskKVDir == "" {
		return nil
	}
	for g := range t.block {
		if err := e.openDisk(g, share(e.cfg.DiskKVBytes, e.info.GroupBlocks(g), device)); err != nil {
			return err
		}
	}
	return nil
}

// share is how many blocks of a group a tier of so many bytes has, when the group has so many of a device's bytes.
func share(tier int64, blocks int, device int64) int {
	if tier <= 0 || device <= 0 {
		return 0
	}
	hi, lo := bits.Mul64(uint64(tier), uint64(blocks))
	if hi >= uint64(device) {
		return math.MaxInt32
	}
	n, _ := bits.Div64(hi, lo, uint64(device))
	return int(min(n, math.MaxInt32)) // as many as can be numbered
}

// hostMemory asks the system for memory beyond Go's heap, where a refusal is an error and not the end of the process.
func hostMemory(bytes int) ([]byte, error) {
	b, err := unix.Mmap(-1, 0, bytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("take %d bytes of host memory for KV: %w", bytes, err)
	}
	return b, nil
}

// openDisk opens the files of a group: those of the first lie in the folder itself, those of a window in one of their own.
func (e *Engine) openDisk(g, slots int) error {
	i, dir, window := &e.info, e.cfg.DiskKVDir, ""
	if g > 0 {
		tokens := i.Windows[g-1].Tokens
		dir, window = filepath.Join(dir, fmt.Sprintf("window-%d", tokens)), fmt.Sprintf(", window %d", tokens)
	}
	if slots == 0 {
		return fmt.Errorf("%d bytes on disk hold no KV block of each group of layers; one of group %d has %d bytes", e.cfg.DiskKVBytes, g, e.tiers.block[g])
	}
	files, kept, discarded, err := kvdisk.Open(kvdisk.Options{
		Dir: dir, Slots: slots, Tokens: i.TokensPerBlock, Block: e.tiers.block[g],
		Identity: fmt.Sprintf("model %s, %s, %d layers, %d heads of %d, rope %s, numerics %s%s", i.ModelHash, i.KVType, i.Layers, i.KVHeads, i.HeadSize, i.RoPE, i.Numerics, window),
	})
	if err != nil {
		return fmt.Errorf("keep KV on disk: %w", err)
	}
	e.tiers.disk = append(e.tiers.disk, files)
	if discarded != "" {
		e.cfg.Logger.Warn("what the disk kept of KV is discarded", "dir", dir, "why", discarded)
	}
	used := e.pool.Group(g).AddTier(kvevent.Disk, slots, kept)
	e.cfg.Logger.Info("kv on disk", "dir", dir, "blocks", slots, "kept", used)
	return nil
}

func (t *tiers) slot(m kv.Move) []byte {
	n := t.block[m.Group]
	return t.host[m.Group][int(m.Slot)*n:][:n]
}

// whole is all of a device block.
func (e *Engine) whole(m kv.Move) []backend.Region {
	return wholeBlock(e.info, m.Group, m.Device)
}

// offload begins copies of cached blocks to the tiers.
func (e *Engine) offload() {
	for g := range e.tiers.host {
		for e.tiers.running(g, kvevent.Host) < maxOffloads {
			m, ok := e.pool.Group(g).NextOffload(kvevent.Host)
			if !ok {
				break
			}
			e.store(m, e.tiers.slot(m), func() error { return nil })
		}
	}
	if e.cfg.Now() < e.tiers.diskAfterNS {
		return
	}
	for g, files := range e.tiers.disk {
		for e.tiers.running(g, kvevent.Disk) < maxOffloads {
			m, ok := e.pool.Group(g).NextOffload(kvevent.Disk)
			if !ok {
				break
			}
			keep, data := e.pool.Group(g).Keep(m), make([]byte, e.tiers.block[g])
			e.store(m, data, func() error { return files.Write(keep, data) })
		}
	}
}

// running counts the copies of a group to a tier.
func (t *tiers) running(group int, tier kvevent.Tier) int {
	n := 0
	for m := range t.out {
		if m.Group == group && m.Tier == tier {
			n++
		}
	}
	return n
}

// store copies a device block to data, and then does what keeps it.
func (e *Engine) store(m kv.Move, data []byte, keep func() error) {
	e.tiers.out[m] = struct{}{}
	call := e.watch.enter()
	c := e.b.CopyOut(e.whole(m), data)
	e.watch.leave(call)
	e.watch.begun(c)
	go func() {
		<-c.Done() // also of a device that hangs: until then the memory is its
		e.watch.ended(c)
		err := c.Err
		if err == nil {
			err = keep()
		}
		e.post(func() {
			delete(e.tiers.out, m)
			e.pool.Group(m.Group).Offloaded(m, err == nil)
			if err == nil {
				return
			}
			if m.Tier == kvevent.Disk {
				e.tiers.diskAfterNS = e.cfg.Now() + diskPause.Nanoseconds()
				e.tiers.diskFailed++
			}
			e.cfg.Logger.Warn("kv block was not stored", "tier", m.Tier, "error", err)
		})
	}()
}

// onboard begins the copies to the device that a sequence waits for.
func (e *Engine) onboard(s *Sequence) {
	e.sched.Enter(&s.q)
	e.tiers.in[s] = struct{}{}
	copies, keeps := make([]*backend.Copy, len(s.q.Loads)), make([]kv.Kept, len(s.q.Loads))
	for i, m := range s.q.Loads {
		if m.Tier == kvevent.Host {
			call := e.watch.enter()
			copies[i] = e.b.CopyIn(e.whole(m), e.tiers.slot(m))
			e.watch.leave(call)
			e.watch.begun(copies[i])
		} else {
			keeps[i] = e.pool.Group(m.Group).Keep(m)
		}
	}
	loads := s.q.Loads
	go func() {
		good := 0
		var failed error
		for i, c := range copies {
			var err error
			if c == nil && failed == nil {
				c, err = e.read(loads[i], keeps[i])
			}
			if c != nil { // also after a failure: the copy names a block
				<-c.Done()
				e.watch.ended(c)
				err = c.Err
			}
			switch {
			case failed != nil:
			case err != nil:
				failed = err
			default:
				good++
			}
		}
		e.post(func() {
			delete(e.tiers.in, s)
			if failed != nil {
				e.cfg.Logger.Warn("kv block was not loaded; it is computed", "request_id", s.req.ID, "tier", loads[good].Tier, "error", failed)
			}
			s.countLoads(loads, good)
			if e.sched.Loaded(&s.q, good) && !s.ended {
				e.begin(s)
			}
		})
	}()
}

// read begins the copy of a block of the disk.
func (e *Engine) read(m kv.Move, k kv.Kept) (*backend.Copy, error) {
	data := make([]byte, e.tiers.block[m.Group])
	if err := e.tiers.disk[m.Group].Read(k, data); err != nil {
		return nil, err
	}
	return e.watch.begun(e.b.CopyIn(e.whole(m), data)), nil
}

// closeTiers waits, at the end of loop, for the copies between the tiers: they name blocks and memory.
func (e *Engine) closeTiers(wait time.Duration) {
	e.timer.Reset(wait)
	for len(e.tiers.out)+len(e.tiers.in) > 0 {
		select {
		case <-e.commands.wake:
			for _, command := range e.commands.take() {
				command()
			}
		case <-e.timer.C:
			return // memory and files stay with the copies, until the process ends
		}
	}
	e.tiers.close()
}

// close gives memory and files back, which no copy uses.
func (t *tiers) close() {
	for g, b := range t.host {
		if b != nil {
			_ = unix.Munmap(b) // it was mapped so
			t.host[g] = nil
		}
	}
	for _, files := range t.disk {
		files.Close()
	}
	t.disk = nil
}
