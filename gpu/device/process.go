package device

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"time"

	"meridian.internal/gpu/ranks"
	"meridian.internal/gpu/remote"
	"meridian.internal/shared/clock"
)

// processes are the ranks that are processes, on their way to be ready.
type processes []*remote.Process

// start begins the processes of all ranks but the first: this program with the same options, and a number.
func (o *Options) start() (list processes, err error) {
	if !o.RankProcesses {
		return nil, nil
	}
	program, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("--rank-processes: %w", err)
	}
	for rank := 1; rank < o.Ranks; rank++ {
		cmd := exec.Command(program, append(append([]string(nil), os.Args[1:]...), fmt.Sprintf("--rank=%d", rank))...)
		p, err := remote.Start(rank, cmd)
		if err != nil {
			list.close()
			return nil, fmt.Errorf("--rank-processes: %w", err)
		}
		list = append(list, p)
	}
	return list, nil
}

// close ends processes that never became engines.
func (l processes) close() {
	for _, p := range l {
		_ = p.Kill() // it may be loading a model, and would not see its end
		_ = p.Close()
	}
}

// loadLimit is how long a rank may load its model after rank 0 has.
const loadLimit = 10 * time.Minute

// open waits until the ranks are ready. What is not ready is ended.
func (l processes) open(ctx context.Context, deadline time.Duration, now func() int64, log *slog.Logger) ([]*remote.Engine, error) {
	ctx, cancel := context.WithTimeout(ctx, loadLimit)
	defer cancel()
	var out []*remote.Engine
	for i, p := range l {
		e, err := remote.Open(ctx, p, remote.Options{Rank: i + 1, Deadline: deadline, Now: now, Logger: log})
		if err != nil {
			for _, e := range out {
				err = errors.Join(err, e.Close())
			}
			l[i:].close()
			return nil, fmt.Errorf("--rank-processes: %w", err)
		}
		out = append(out, e)
	}
	return out, nil
}

// RankClocks are where the clocks of the ranks that are processes answer.
func (d *Device) RankClocks() map[int]string {
	out := map[int]string{}
	for _, e := range d.remotes {
		out[e.Rank()] = e.Hello().ClockAddr
	}
	return out
}

// ServeRank runs the rank that Options.Rank names, for the node that started this process. Its clock answers at addr.
func ServeRank(ctx context.Context, o Options, steady *clock.Steady, addr string, log *slog.Logger) error {
	links, err := remote.Inherited()
	if err != nil {
		return fmt.Errorf("--rank %d: %w", o.Rank, err)
	}
	d := &Device{}
	o.ClockID = steady.ID()
	cfg, err := d.load(&o, o.Rank, 1, steady.Now, log)
	if err != nil {
		return errors.Join(err, d.Close())
	}
	return errors.Join(ranks.Serve(ctx, ranks.ServeOptions{
		Options: ranks.Options{Engine: cfg, Backends: d.backends, Sink: o.Sink, Cards: o.rankCards(), Deadline: o.RankDeadline}, Rank: o.Rank, Ranks: o.Ranks,
		Links: links, ClockID: o.ClockID, ClockAddr: addr, CardClocks: d.CardClocks,
	}), d.Close())
}
