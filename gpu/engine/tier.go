package engine

import (
	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/kv"
	"meridian.internal/shared/infer"
)

// tier is the host memory that keeps KV blocks which the device may evict. Only the engine's goroutine uses it; the device
// reads and writes the bytes of a block while a move of it runs.
type tier struct {
	block int                    // bytes of a block in the canonical layout
	bytes []byte                 // empty: there is no second tier
	out   map[kv.Move]struct{}   // copies to the host in flight
	in    map[*Sequence]struct{} // sequences whose copies from the host are in flight
}

// maxOffloads bounds the copies to the host that run beside the work.
const maxOffloads = 4

// openTier takes the host memory for KV.
func (e *Engine) openTier() {
	st := e.info.Stage
	e.tier.out, e.tier.in = map[kv.Move]struct{}{}, map[*Sequence]struct{}{}
	e.tier.block = e.info.KVBytes(st.First, st.End) * e.info.TokensPerBlock
	n := int(e.cfg.HostKVBytes / int64(e.tier.block))
	if n == 0 || !e.cfg.PrefixReuse {
		return
	}
	e.tier.bytes = make([]byte, n*e.tier.block)
	e.pool.AddHost(n)
}

func (t *tier) slot(m kv.Move) []byte { return t.bytes[int(m.Host)*t.block:][:t.block] }

// whole is all of a device block.
func (e *Engine) whole(m kv.Move) []backend.Region {
	st := e.info.Stage
	return Regions(nil, e.info, []int32{m.Device}, infer.Span{LayerFrom: st.First, LayerTo: st.End, TokenTo: e.info.TokensPerBlock})
}

// offload begins copies of cached blocks to the host.
func (e *Engine) offload() {
	for len(e.tier.out) < maxOffloads {
		m, ok := e.pool.NextOffload()
		if !ok {
			return
		}
		e.tier.out[m] = struct{}{}
		c := e.b.CopyOut(e.whole(m), e.tier.slot(m))
		go func() {
			<-c.Done()
			e.post(func() {
				delete(e.tier.out, m)
				e.pool.Offloaded(m, c.Err == nil)
				e.complain("to the host", c.Err)
			})
		}()
	}
}

// onboard begins the copies from the host that a sequence waits for.
func (e *Engine) onboard(s *Sequence) {
	e.sched.Enter(&s.q)
	e.tier.in[s] = struct{}{}
	copies := make([]*backend.Copy, len(s.q.Loads))
	for i, m := range s.q.Loads {
		copies[i] = e.b.CopyIn(e.whole(m), e.tier.slot(m))
	}
	go func() {
		var err error
		for _, c := range copies {
			<-c.Done()
			if c.Err != nil {
				err = c.Err
			}
		}
		e.post(func() {
			delete(e.tier.in, s)
			e.complain("from the host", err)
			e.sched.Loaded(&s.q, err == nil)
			if !s.ended {
				e.begin(s)
			}
		})
	}()
}

func (e *Engine) complain(way string, err error) {
	if err != nil {
		e.cfg.Logger.Warn("kv block was not copied "+way, "error", err)
	}
}

// awaitMoves waits, at the end of Run, for the copies between the tiers: they name blocks and memory.
func (e *Engine) awaitMoves() {
	e.timer.Reset(stopWait)
	for len(e.tier.out)+len(e.tier.in) > 0 {
		select {
		case <-e.commands.wake:
			for _, command := range e.commands.take() {
				command()
			}
		case <-e.timer.C:
			return
		}
	}
}
