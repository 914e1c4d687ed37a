package engine

import (
	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// batchEntry is what all requests of a step have in common, kept once for all of them: 48 bytes.
type batchEntry struct {
	iter  int64
	st    backend.Stamps
	token int64 // when the host had the tokens
	size  int64
}

// A page of entries takes 8 KiB, a size class of the allocator.
const pageEntries = (8192 - 8) / 48

// batchPage links forward only: a page is freed when the last request that began on it, or before it, has ended.
type batchPage struct {
	entries [pageEntries]batchEntry
	next    *batchPage
}

// batchLog is the engine's log of steps, for the requests that keep theirs.
type batchLog struct {
	page *batchPage
	n    int   // entries of the page
	seq  int64 // entries ever
}

// add logs a step.
func (l *batchLog) add(e batchEntry) {
	if l.page == nil || l.n == pageEntries {
		fresh := new(batchPage)
		if l.page != nil {
			l.page.next = fresh
		}
		l.page, l.n = fresh, 0
	}
	l.page.entries[l.n] = e
	l.n++
	l.seq++
}

// run is a range of logged steps that held a request: each took the token after the one before it.
type run struct {
	page     *batchPage
	at       int32 // of the first, in the page
	n        int32
	seq      int64 // of the last
	step, kv int32 // of the first
	tokens   int32 // of each
}

// stepLog is the decode steps of one request.
type stepLog struct {
	runs      []run
	n, max    int
	truncated int64
	kept      *infer.Steps // the first max of them, once there were more
}

// add takes in the newest step of the log.
func (l *stepLog) add(b *batchLog, step, kv, tokens int) {
	if l.n >= l.max {
		if l.kept == nil { // do not hold the log of all that is to come
			l.kept, l.runs = l.columns(), nil
		}
		l.truncated++
		return
	}
	l.n++
	if k := len(l.runs) - 1; k >= 0 {
		r := &l.runs[k]
		if tokens == 1 && r.tokens == 1 && r.seq+1 == b.seq && int(r.kv+r.n) == kv && int(r.step+r.n) == step {
			r.n++
			r.seq = b.seq
			return
		}
	}
	l.runs = append(l.runs, run{page: b.page, at: int32(b.n - 1), n: 1, seq: b.seq, step: int32(step), kv: int32(kv), tokens: int32(tokens)})
}

// columns gives the steps as records carry them.
func (l *stepLog) columns() *infer.Steps {
	if l.kept != nil {
		l.kept.Truncated = l.truncated
		return l.kept
	}
	c := newColumns(l.n)
	i := 0
	for _, r := range l.runs {
		page, at := r.page, int(r.at)
		for k := range r.n {
			if at == pageEntries {
				page, at = page.next, 0
			}
			e := &page.entries[at]
			c.Step[i], c.Iter[i], c.TokenNS[i] = r.step+k, e.iter, e.token
			c.ForwardStartNS[i], c.ForwardEndNS[i], c.SampleEndNS[i] = e.st.ForwardStartNS, e.st.ForwardEndNS, e.st.SampleEndNS
			c.KVTokens[i], c.BatchSize[i], c.Tokens[i] = r.kv+k, int32(e.size), r.tokens
			i++
			at++
		}
	}
	return c
}

// newColumns makes columns of n steps in two allocations.
func newColumns(n int) *infer.Steps {
	wide, narrow := make([]int64, 5*n), make([]int32, 4*n)
	next64 := func() []int64 {
		c := wide[:n:n]
		wide = wide[n:]
		return c
	}
	next32 := func() []int32 {
		c := narrow[:n:n]
		narrow = narrow[n:]
		return c
	}
	return &infer.Steps{
		Step: next32(), Iter: next64(), ForwardStartNS: next64(), ForwardEndNS: next64(), SampleEndNS: next64(), TokenNS: next64(),
		KVTokens: next32(), BatchSize: next32(), Tokens: next32(),
	}
}
