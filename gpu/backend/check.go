package backend

import "fmt"

// Check refuses an entry that would touch what a back end does not have. Every back end asks before it runs anything of a
// batch; the error names the value and the limit.
func (e *Entry) Check(info *Info) error {
	q := e.Queries()
	switch {
	case e.Slot < 0 || e.Slot >= info.MaxSlots:
		return fmt.Errorf("slot %d, there are %d", e.Slot, info.MaxSlots)
	case q == 0:
		return fmt.Errorf("slot %d has no query token", e.Slot)
	case e.KVLen < 0 || e.KVLen+q > info.ContextLen:
		return fmt.Errorf("positions [%d, %d), the context has %d", e.KVLen, e.KVLen+q, info.ContextLen)
	case len(e.Blocks)*info.TokensPerBlock < e.KVLen+q:
		return fmt.Errorf("%d KV blocks of %d tokens for %d positions", len(e.Blocks), info.TokensPerBlock, e.KVLen+q)
	}
	for _, t := range e.Tokens {
		if t < 0 || int(t) >= info.Vocab {
			return fmt.Errorf("token %d, the vocabulary has %d", t, info.Vocab)
		}
	}
	for _, b := range e.Blocks {
		if b < 0 || int(b) >= info.KVBlocks {
			return fmt.Errorf("KV block %d, there are %d", b, info.KVBlocks)
		}
	}
	if err := e.checkWindows(info); err != nil {
		return err
	}
	for i, j := range e.Logits {
		if j < 0 || j >= q || i > 0 && j <= e.Logits[i-1] {
			return fmt.Errorf("logits wanted at %v, must be rising query indices below %d", e.Logits, q)
		}
	}
	return nil
}

// checkWindows looks only at what is read: the engine may fill and empty other parts of a table while the step is queued.
func (e *Entry) checkWindows(info *Info) error {
	if len(e.Windows) != len(info.Windows) {
		return fmt.Errorf("%d block tables of windows, there are %d windows", len(e.Windows), len(info.Windows))
	}
	per := info.TokensPerBlock
	for i, table := range e.Windows {
		w := &info.Windows[i]
		from, to := max(e.KVLen-w.Tokens+1, 0)/per, (e.KVLen+e.Queries()+per-1)/per
		if len(table) < to {
			return fmt.Errorf("%d KV blocks of %d tokens for %d positions, window of %d", len(table), per, e.KVLen+e.Queries(), w.Tokens)
		}
		for _, b := range table[from:to] {
			if b < 0 || int(b) >= w.Blocks {
				return fmt.Errorf("KV block %d, the window of %d has %d", b, w.Tokens, w.Blocks)
			}
		}
	}
	return nil
}
