package collect

import "meridian.internal/router/timeline"

// Expect gives the first line of a request as soon as it is merged, whether or not it is on disk yet. Call it before the
// router's own record is added; forget ends it.
func (c *Collector) Expect(requestID string) (line <-chan *timeline.Line, forget func()) {
	ch := make(chan *timeline.Line, 1) // holds the one that is expected
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.expects == nil {
		c.expects = map[string]chan<- *timeline.Line{}
	}
	c.expects[requestID] = ch
	c.hasten()
	return ch, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.expects, requestID)
	}
}

// hasten ends what messages gather for now.
func (c *Collector) hasten() {
	select {
	case c.hurry <- struct{}{}:
	default:
	}
}

// expected hands a line to who waits for it.
func (c *Collector) expected(l *timeline.Line) {
	c.mu.Lock()
	ch := c.expects[l.RequestID]
	delete(c.expects, l.RequestID)
	c.mu.Unlock()
	if ch != nil {
		ch <- l // holds it
	}
}
