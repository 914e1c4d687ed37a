package proxy

import (
	"time"

	"meridian.internal/router/perfheader"
	"meridian.internal/shared/api"
)

// costWait bounds how long a client that asks what its request cost waits for the records of the nodes. They are published before
// a node's last byte, so that they are here milliseconds later; what takes longer is left to /timelines.
const costWait = 500 * time.Millisecond

// expectCost begins to wait for the merged line; call it before the record is handed over. The function that it returns
// waits, and gives nothing where nothing was asked for or the line is late.
func (s *session) expectCost(e *api.Error) func() []perfheader.Header {
	if !s.perf || e != nil {
		return func() []perfheader.Header { return nil }
	}
	line, forget := s.p.o.Expect(s.id)
	return func() []perfheader.Header {
		defer forget()
		t := time.NewTimer(costWait)
		defer t.Stop()
		select {
		case l := <-line:
			return perfheader.Of(l)
		case <-t.C:
			return nil
		}
	}
}

// setClockSync tells the client when its request came and its answer began, by this router's clock.
func (s *session) setClockSync() {
	if s.perf {
		s.w.Header()[api.HeaderClockSync] = []string{string(perfheader.AppendClockSync(nil, s.times.received, s.p.o.Steady.Now()))}
	}
}

// cost ends a stream with the event of TensorRT-LLM, after the end mark.
func (o *stream) cost(headers []perfheader.Header) {
	if len(headers) == 0 {
		return
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.buf = perfheader.AppendEvent(o.buf, headers)
	_ = o.flushLocked() // a client that left here has all its tokens
}
