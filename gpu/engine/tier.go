package engine

import (
	"fmt"
	"time"

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
	disk  *kvdisk.Files          // nil: there is none
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

// openTiers takes the host memory and the files for KV.
func (e *Engine) openTiers() error {
	t := &e.tiers
	t.out, t.in = map[kv.Move]struct{}{}, map[*Sequence]struct{}{}
	device := 0.0 // bytes of all groups
	for g := range 1 + len(e.windows) {
		t.block = append(t.block, e.info.BlockBytes(g))
		device += float64(t.block[g] * e.info.GroupBlocks(g))
	}
	t.host = make([][]byte, len(t.block))
	if !e.cfg.PrefixReuse {
		return nil
	}
	for g, block := range t.block { // host memory is divided as the device's is
		if n := int(float64(e.cfg.HostKVBytes) * float64(e.info.GroupBlocks(g)) / device); n > 0 && block > 0 {
			t.host[g] = make([]byte, n*block)
			e.pool.Group(g).AddTier(kvevent.Host, n, nil)
		}
	}
	if e.cfg.DiskKVDir == "" || !e.full {
		return nil
	}
	i := &e.info
	files, kept, discarded, err := kvdisk.Open(kvdisk.Options{
		Dir: e.cfg.DiskKVDir, Bytes: e.cfg.DiskKVBytes, Tokens: i.TokensPerBlock, Block: t.block[0],
		Identity: fmt.Sprintf("model %s, %s, %d layers, %d heads of %d, rope %s, numerics %s", i.ModelHash, i.KVType, i.Layers, i.KVHeads, i.HeadSize, i.RoPE, i.Numerics),
	})
	if err != nil {
		return err
	}
	t.disk = files
	if discarded != "" {
		e.cfg.Logger.Warn("what the disk kept of KV is discarded", "dir", e.cfg.DiskKVDir, "why", discarded)
	}
	used := e.pool.AddTier(kvevent.Disk, files.Slots(), kept)
	e.cfg.Logger.Info("kv on disk", "dir", e.cfg.DiskKVDir, "blocks", files.Slots(), "kept", used)
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
	if e.tiers.disk == nil || e.cfg.Now() < e.tiers.diskAfterNS {
		return
	}
	for e.tiers.running(0, kvevent.Disk) < maxOffloads {
		m, ok := e.pool.NextOffload(kvevent.Disk)
		if !ok {
			break
		}
		keep, data := e.pool.Keep(m), make([]byte, e.tiers.block[0])
		e.store(m, data, func() error { return e.tiers.disk.Write(keep, data) })
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
	c := e.b.CopyOut(e.whole(m), data)
	go func() {
		<-c.Done()
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
			copies[i] = e.b.CopyIn(e.whole(m), e.tiers.slot(m))
		} else {
			keeps[i] = e.pool.Keep(m)
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
	data := make([]byte, e.tiers.block[0])
	if err := e.tiers.disk.Read(k, data); err != nil {
		return nil, err
	}
	return e.b.CopyIn(e.whole(m), data), nil
}

// closeTiers waits, at the end of Run, for the copies between the tiers: they name blocks and memory.
func (e *Engine) closeTiers() {
	e.timer.Reset(stopWait)
	for len(e.tiers.out)+len(e.tiers.in) > 0 {
		select {
		case <-e.commands.wake:
			for _, command := range e.commands.take() {
				command()
			}
		case <-e.timer.C:
			return
		}
	}
	if e.tiers.disk != nil {
		e.tiers.disk.Close()
	}
}
