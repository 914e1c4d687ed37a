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
	for i, j := range e.Logits {
		if j < 0 || j >= q || i > 0 && j <= e.Logits[i-1] {
			return fmt.Errorf("logits wanted at %v, must be rising query indices below %d", e.Logits, q)
		}
	}
	return nil
}
