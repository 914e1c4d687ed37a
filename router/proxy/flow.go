package proxy

import (
	"context"
	"runtime"

	"meridian.internal/shared/api"
	"meridian.internal/shared/poll"
)

// flow is a stream of the generation leg that a loop passes on while the goroutine of its request sleeps: a token costs a read
// and a write, and no wake-up of its own. The goroutine has the stream back as soon as anything else is to be done: it ends or
// breaks, its client is slow or has left, its time is over. The loop's goroutine and that of the request never use it at the
// same time.
type flow struct {
	a        *attempt
	back     chan struct{} // the loop has let go of the stream
	e        *api.Error    // what pass returned
	err      error         // likewise
	panicked any
}

// flows tells whether a loop can pass the stream on: there are sockets on both sides, and no other choice writes to the client,
// for whom the loop could have to wait. The first token is waited for by the goroutine, which is woken sooner.
func (a *attempt) flows() bool {
	s := a.s
	return s.p.o.Loops != nil && len(s.subs) == 1 && a.stamps.FirstTokenNS != nil && a.gen.Socket() != nil && (s.out == nil || s.out.now != nil)
}

// await waits for more of the stream and passes it on; it returns what pass does. A stream that has more as soon as all others
// had their turn stays: to hand it over costs more than a token does.
func (a *attempt) await(ctx context.Context) (*api.Error, error) {
	if a.flows() {
		runtime.Gosched()
		if _ = a.gen.FillNow(); a.gen.Ready() { // pass says what it met
			return a.pass()
		}
		a.gen.Rest()
		f := flow{a: a, back: make(chan struct{}, 1)}
		if w, err := a.s.p.o.Loops.Next().Watch(a.gen.Socket(), poll.Readable, f.ready); err == nil {
			return f.wait(ctx, w)
		}
	}
	_ = a.gen.Fill() // pass says what it met
	return a.pass()
}

// wait waits until the loop has let go of the stream.
func (f *flow) wait(ctx context.Context, w *poll.Watch) (*api.Error, error) {
	select {
	case <-f.back:
	case <-ctx.Done():
	}
	w.Stop()
	switch {
	case f.panicked != nil:
		panic(f.panicked) // as it would have here
	case f.e == nil && f.err == nil && ctx.Err() != nil:
		return nil, context.Cause(ctx)
	}
	return f.e, f.err
}

// ready passes on what has come; false: the stream is its goroutine's again. The loop calls it.
func (f *flow) ready() (more bool) {
	defer func() {
		if f.panicked = recover(); !more {
			f.back <- struct{}{}
		}
	}()
	a := f.a
	_ = a.gen.FillNow() // pass says what it met
	if f.e, f.err = a.pass(); f.e != nil || f.err != nil {
		return false
	}
	a.gen.Rest()
	return a.flushNow()
}
