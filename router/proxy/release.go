package proxy

import (
	"context"
	"strconv"
	"time"

	"meridian.internal/router/upstream"
)

// releaseTime bounds the wait for the acknowledgement; without one the lease on the context node ends by itself.
const releaseTime = time.Second

// release tells the context node that nobody will fetch the KV of this leg. Between the legs the router is the only one who
// knows. The record says when the node acknowledged.
func (c *prefillCall) release() {
	l, p := c.lease, c.a.s.p
	if l.Foreign || c.leg == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseTime) // the request's own has ended
	defer cancel()
	res, err := p.o.Client.Do(ctx, &upstream.Request{
		Method: "DELETE", URL: l.URL, Path: "/kv/" + strconv.FormatInt(c.id, 10), Header: c.a.header(nil),
	})
	if err != nil {
		p.o.Logger.Warn("kv was not released; its lease ends by itself", "request_id", c.a.s.id, "node", l.Name, "error", err)
		return
	}
	defer res.Drain(drainTime)
	if res.Status == 204 { // 404: it held none, or the cancel of the leg has freed it already
		c.releasedNS.Store(p.o.Steady.Now())
	}
}
