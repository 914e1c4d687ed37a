package service

import (
	"context"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/clocksync/estimate"
	"meridian.internal/clocksync/track"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
)

const (
	historyLimit = 3 * time.Second // a daemon without history is better than one that waits
	historySpan  = 15 * time.Minute
	historyBatch = 500
)

// remember reads what earlier daemons logged, so that the estimators go on where those stopped.
func (s *Service) remember(ctx context.Context) {
	if err := s.opts.Conn.Ready(ctx); err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, historyLimit)
	defer cancel()
	h := &track.History{Reference: s.opts.Steady.ID().Epoch(), ByEpoch: map[string][]estimate.Stored{}}
	n := 0
	err := readLog(ctx, s.opts.Conn.JetStream(), bus.SubjectClock, time.Now().Add(-historySpan), func(p clock.Published) {
		if b, ok := storedOf(p, h.Reference); ok {
			h.ByEpoch[p.Local.Epoch()] = append(h.ByEpoch[p.Local.Epoch()], b)
			n++
		}
	})
	if err != nil {
		s.opts.Logger.Warn("clock history not read in whole", "read", n, "error", err)
	}
	if n > 0 {
		s.opts.Logger.Info("clock history read", "bursts", n, "clocks", len(h.ByEpoch))
	}
	s.tracker.Remember(h)
}

// storedOf takes a logged edge against the clock with this epoch.
func storedOf(p clock.Published, epoch string) (estimate.Stored, bool) {
	ok := p.Router == "" && p.Lower != nil && p.Upper != nil && p.Reference.Epoch() == epoch && p.State != clock.Quarantined
	if !ok {
		return estimate.Stored{}, false
	}
	return estimate.Stored{LowerNS: p.Lower.NS, LowerAtNS: p.Lower.AtNS, UpperNS: p.Upper.NS, UpperAtNS: p.Upper.AtNS}, true
}

// readLog reads what the clock log holds since a moment, up to now.
func readLog(ctx context.Context, js jetstream.JetStream, subject string, since time.Time, each func(clock.Published)) error {
	stream, err := js.Stream(ctx, bus.StreamClockLog)
	if err != nil {
		return fmt.Errorf("open stream %s: %w", bus.StreamClockLog, err)
	}
	c, err := stream.OrderedConsumer(ctx, jetstream.OrderedConsumerConfig{
		FilterSubjects: []string{subject}, DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &since,
	})
	if err != nil {
		return fmt.Errorf("read stream %s: %w", bus.StreamClockLog, err)
	}
	for ctx.Err() == nil {
		batch, err := c.FetchNoWait(historyBatch)
		if err != nil {
			return fmt.Errorf("fetch from %s: %w", bus.StreamClockLog, err)
		}
		n := 0
		for m := range batch.Messages() {
			n++
			if p, err := clock.ParsePublished(m.Data()); err == nil { // what is not an estimate is not ours
				each(p)
			}
		}
		if err := batch.Error(); err != nil {
			return fmt.Errorf("fetch from %s: %w", bus.StreamClockLog, err)
		}
		if n == 0 {
			return nil
		}
	}
	return ctx.Err()
}

// ReadLog returns what was logged of a node's clock against a router's, oldest first; against the daemon's own with an
// empty router.
func ReadLog(ctx context.Context, conn *bus.Conn, nodeName, router string, span time.Duration) ([]clock.Published, error) {
	var out []clock.Published
	err := readLog(ctx, conn.JetStream(), bus.ClockSubject(nodeName), time.Now().Add(-span), func(p clock.Published) {
		if p.Node == nodeName && p.Router == router {
			out = append(out, p)
		}
	})
	return out, err
}
