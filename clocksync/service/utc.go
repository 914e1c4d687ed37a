package service

import (
	"context"
	"time"

	"meridian.internal/shared/clock"
)

// utcEvery is how often UTC is published.
const utcEvery = time.Second

// UTCName stands for UTC where a router's name stands otherwise: the key of what leads from a router's steady clock to UTC is
// "utc.<router>".
const UTCName = "utc"

// tellUTC publishes how each router's steady clock leads to UTC.
func (s *Service) tellUTC(ctx context.Context) error {
	tick := time.NewTicker(utcEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if !s.lead.held() {
			continue
		}
		if st, ok := s.opts.UTC.Now(); ok {
			for _, p := range s.utcOf(st.Estimate) {
				s.out.newest(p)
			}
		}
	}
}

// utcOf composes UTC against our own clock with our own clock against each router's.
func (s *Service) utcOf(own clock.Estimate) []clock.Published {
	var out []clock.Published
	for key, r := range s.snapshot() {
		e, ok := s.tracker.Newest(key)
		if !r.router || !ok {
			continue
		}
		if c, ok := clock.Compose(own, e, s.opts.Name); ok {
			out = append(out, clock.Published{Router: UTCName, Node: r.name, By: s.opts.Name, Estimate: c})
		}
	}
	return out
}
