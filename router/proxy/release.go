package proxy

import (
	"context"
	"strconv"
	"time"

	"meridian.internal/router/upstream"
)

// releaseTime bounds the wait for the acknowledgement; without one the lease on the context node ends by itself.
const releaseTime = time.Second

// releaseKV tells the context node that nobody will fetch the KV of this attempt. Between the legs the router is the only
// one who knows. The record says when the node acknowledged.
func (a *attempt) releaseKV() {
	l := a.choice.Ctx
	if l.Foreign || a.ctxLeg == nil || a.stamps.CtxDispatchNS == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), releaseTime) // the request's own has ended
	defer cancel()
	res, err := a.s.p.o.Client.Do(ctx, &upstream.Request{
		Method: "DELETE", URL: l.URL, Path: "/kv/" + strconv.FormatInt(a.id, 10), Headers: a.headers(),
	})
	if err != nil {
		a.s.p.o.Logger.Warn("kv was not released; its lease ends by itself", "request_id", a.s.id, "node", l.Name, "error", err)
		return
	}
	defer res.Drain(drainTime)
	if res.Status == 204 { // 404: it held none, or the cancel of the leg has freed it already
		a.ctxLeg.ReleasedNS = a.now()
	}
}
