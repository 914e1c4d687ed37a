package ledger

import (
	"context"
	"time"
)

const (
	publishBatch = 64
	publishPause = 20 * time.Millisecond // rows come by the hundred a second: they travel together
)

// Publish sends rows with send as they come, until ctx ends. What it cannot send is lost to its readers, who see the gap
// in the rows' numbers: serving does not wait for them.
func (l *Ledger) Publish(ctx context.Context, send func(row []byte) error) error {
	if l.ring == nil {
		return nil
	}
	cursor := int64(0)
	timer := time.NewTimer(publishPause)
	defer timer.Stop()
	for {
		p := l.ring.Read(cursor, publishBatch)
		cursor = p.Next
		for _, r := range p.Rows {
			if err := send(r); err != nil {
				l.o.Logger.Debug("row not published", "error", err)
			}
		}
		if l.ring.Closed() && len(p.Rows) == 0 {
			return nil
		}
		if len(p.Rows) > 0 {
			timer.Reset(publishPause)
			select {
			case <-ctx.Done():
				return nil
			case <-timer.C:
				continue
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-l.ring.Changed(cursor):
		}
	}
}
