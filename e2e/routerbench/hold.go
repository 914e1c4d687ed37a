package routerbench

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// slow is the pace while streams are held open: a token so rarely that next to none is on its way.
var slow = Pace{Gap: 500 * time.Millisecond}

// heldTokens keep a stream open for as long as it is looked at.
const heldTokens = 1000

// settleTime is how long open streams stay at most before memory is read: buffers that idle are to be given back by then.
const settleTime = 2 * time.Second

// streamBytes is what an open stream takes of the subject's memory: the growth of a process that has just started, over
// the number of streams.
func (s *subject) streamBytes(ctx context.Context, w Listening, streams int, settle time.Duration) (float64, error) {
	if err := w.setPace(ctx, slow); err != nil {
		return 0, err
	}
	before, err := s.residentBytes()
	if err != nil {
		return 0, err
	}
	l := load{streams: streams, tokens: heldTokens, prompt: 2 << 10}
	for range streams {
		c, err := s.begin(l)
		if err != nil {
			return 0, err
		}
		defer c.close()
	}
	time.Sleep(settle)
	after, err := s.residentBytes()
	if err != nil {
		return 0, err
	}
	return float64(after-before) / float64(streams), nil
}

// begin sends a request and waits for its first token.
func (s *subject) begin(l load) (*connection, error) {
	c, err := s.connect(l)
	if err != nil {
		return nil, err
	}
	c.endBy(time.Now().Add(readyTime))
	p := c.last()
	if _, err = p.Write(c.sent[len(c.sent)-1]); err == nil {
		err = readHead(p.r, &p.head)
	}
	if err == nil {
		_, err = p.r.Peek(64)
	}
	if err == nil && p.head.status != 200 {
		text, _ := p.r.Peek(p.r.Buffered()) // cannot fail: it is there
		err = fmt.Errorf("%w: status %d: %.300s", errAnswer, p.head.status, text)
	}
	if err != nil {
		c.close()
		return nil, fmt.Errorf("open a stream of %s: %w", s.name, err)
	}
	return c, nil
}

// seenTime bounds the wait for a worker to see that its client has left. It tells late from never.
const seenTime = 20 * time.Second

// leaving closes clients in the middle of prefill and of generation, and returns in ms how long the workers took to see it,
// sorted. A leaving that was not seen is an error.
func (s *subject) leaving(ctx context.Context, w Listening, now func() int64, times int) ([]float64, error) {
	var out []float64
	for _, prefill := range []bool{true, false} {
		pace := Pace{Gap: 5 * time.Millisecond}
		if prefill {
			pace = Pace{Prefill: time.Minute}
		}
		if err := w.setPace(ctx, pace); err != nil {
			return nil, err
		}
		for i := range times {
			ms, err := s.leaveOnce(ctx, w, now, prefill)
			if err != nil {
				return nil, fmt.Errorf("client %d leaves %s (prefill %t): %w", i, s.name, prefill, err)
			}
			out = append(out, ms)
		}
	}
	slices.Sort(out)
	return out, nil
}

func (s *subject) leaveOnce(ctx context.Context, w Listening, now func() int64, prefill bool) (float64, error) {
	leg := "gen"
	if prefill {
		leg = "ctx"
	}
	before, err := w.left(ctx, leg)
	if err != nil {
		return 0, err
	}
	l := load{tokens: heldTokens, prompt: 2 << 10}
	var c *connection
	if prefill {
		if c, err = s.connect(l); err == nil {
			_, err = c.last().Write(c.sent[len(c.sent)-1])
		}
		if err == nil {
			err = w.await(ctx, leg, func(l Left) bool { return l.Begun > before.Begun })
		}
	} else {
		c, err = s.begin(l)
	}
	if err != nil {
		return 0, err
	}
	closed := now()
	c.close()
	var after Left
	err = w.await(ctx, leg, func(l Left) bool { after = l; return l.Count > before.Count })
	return float64(after.LastNS-closed) / 1e6, err
}

// await asks the workers about a leg until it is as wanted.
func (at Listening) await(ctx context.Context, leg string, wanted func(Left) bool) error {
	for deadline := time.Now().Add(seenTime); ; time.Sleep(5 * time.Millisecond) {
		l, err := at.left(ctx, leg)
		switch {
		case err != nil:
			return err
		case wanted(l):
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("the %s worker did not see it within %v (%+v)", leg, seenTime, l)
		}
	}
}
