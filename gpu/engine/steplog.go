package engine

import "meridian.internal/shared/infer"

// step is the record of one decode step of a request: 56 bytes.
type step struct {
	iter                                       int64
	forwardStart, forwardEnd, sampleEnd, token int64
	step, kv, batch, tokens                    int32
}

// pageSteps fill a page of 8 KiB, a size class of the allocator: nothing is wasted.
const pageSteps = 8192 / 56

// stepLog keeps the steps of one request in pages, so that growing copies nothing.
type stepLog struct {
	pages     []*[pageSteps]step
	n, max    int
	truncated int64
}

func (l *stepLog) add(st step) {
	if l.n >= l.max {
		l.truncated++
		return
	}
	at := l.n % pageSteps
	if at == 0 {
		l.pages = append(l.pages, new([pageSteps]step))
	}
	l.pages[len(l.pages)-1][at] = st
	l.n++
}

// columns gives the steps as records carry them.
func (l *stepLog) columns() *infer.Steps {
	wide, narrow := make([]int64, 5*l.n), make([]int32, 4*l.n)
	next64 := func() []int64 {
		c := wide[:l.n:l.n]
		wide = wide[l.n:]
		return c
	}
	next32 := func() []int32 {
		c := narrow[:l.n:l.n]
		narrow = narrow[l.n:]
		return c
	}
	c := &infer.Steps{
		Step: next32(), Iter: next64(), ForwardStartNS: next64(), ForwardEndNS: next64(), SampleEndNS: next64(), TokenNS: next64(),
		KVTokens: next32(), BatchSize: next32(), Tokens: next32(), Truncated: l.truncated,
	}
	for i := range l.n {
		st := &l.pages[i/pageSteps][i%pageSteps]
		c.Step[i], c.Iter[i], c.TokenNS[i] = st.step, st.iter, st.token
		c.ForwardStartNS[i], c.ForwardEndNS[i], c.SampleEndNS[i] = st.forwardStart, st.forwardEnd, st.sampleEnd
		c.KVTokens[i], c.BatchSize[i], c.Tokens[i] = st.kv, st.batch, st.tokens
	}
	return c
}
