package ranks

import (
	"context"
	"errors"

	"meridian.internal/shared/rows"
)

// StartProfile opens a profile window of as many iterations on all ranks, which begins within a few of the same one. The process
// has one CPU profile: rank 0's.
func (g *Group) StartProfile(ctx context.Context, r rows.ProfileRequest) (rows.ProfileWindow, error) {
	w, err := g.ranks[0].StartProfile(ctx, r)
	if err != nil {
		return w, err
	}
	for _, k := range g.ranks[1:] {
		other, err := k.StartProfile(ctx, r)
		if err != nil {
			_, _ = g.StopProfile(ctx) // what has begun is not left open; the first error says why
			return rows.ProfileWindow{}, err
		}
		w.Files = append(w.Files, other.Files...)
	}
	return w, nil
}

// StopProfile ends the windows and waits for their files.
func (g *Group) StopProfile(ctx context.Context) (rows.ProfileWindow, error) {
	w, err := g.ranks[0].StopProfile(ctx)
	for _, k := range g.ranks[1:] {
		other, otherErr := k.StopProfile(ctx)
		if err == nil && otherErr != nil && !errors.Is(otherErr, rows.ErrProfileNone) {
			err = otherErr
		}
		w.Files = append(w.Files, other.Files...)
	}
	return w, err
}
