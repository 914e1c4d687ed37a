package engine

import (
	"io"

	"meridian.internal/shared/infer"
)

// Lend leases the KV of a prompt's beginning that is cached on the device to a transfer, until Release or the deadline; nil if
// there is none. It waits for the engine's goroutine. What windows leave behind of a prompt depends on its length: a model with
// windows lends nothing.
func (e *Engine) Lend(tokens []int32) *Export {
	var x *Export
	e.ask(func() { // of an engine that has ended the pool is nobody's, and peers ask at the same time
		if len(e.windows) > 0 || e.draining.Load() {
			return
		}
		blocks := e.pool.LeasePrefix(tokens)
		if len(blocks) == 0 {
			return
		}
		st := e.info.Stage
		x = newExport(&Sequence{e: e, base: len(blocks) * e.info.TokensPerBlock})
		x.tables, x.leased, x.end = [][]int32{blocks}, true, io.EOF
		x.spans = []infer.Span{{LayerFrom: st.First, LayerTo: st.End, TokenTo: x.s.base}}
		x.deadlineNS = e.cfg.Now() + e.cfg.ExportDeadline.Nanoseconds()
		e.exports[x] = struct{}{}
		e.noteDeadline(x.deadlineNS)
	})
	return x
}

// Keep ends a reservation that will not start: what was installed of the first tokens stays, cached.
func (h *Reservation) Keep(tokens int) {
	h.s.e.post(func() {
		h.mu.Lock()
		ok := !h.started && h.err == nil && h.copies == 0 && h.held < tokens && tokens <= h.s.base && h.complete(tokens) == nil
		h.mu.Unlock()
		if ok {
			h.s.e.sched.Publish(&h.s.q, tokens)
		}
		h.s.e.release(h, infer.Done{Reason: infer.FinishCancelled, Err: ErrCancelled})
	})
}
