package ranks

import (
	"context"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/remote"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

// Sequence is a running request of some rank. Next has one caller at a time; Cancel may be called from anywhere.
type Sequence interface {
	ID() int64
	Rank() int
	Next(ctx context.Context) ([]infer.Token, *infer.Done, error)
	Cancel()
	Export() Export // the KV of a ContextOnly sequence; nil for others
}

// Export is KV of some rank that is leased to a transfer; see engine.Export.
type Export interface {
	Tokens() int
	NextSpan(ctx context.Context) (infer.Span, error)
	Read(ctx context.Context, span infer.Span, dst []byte) error
	Blocks(span infer.Span) ([]int32, error)
	Release()
}

// Reservation holds a place on some rank for KV that comes from another node; see engine.Reservation.
type Reservation interface {
	Held() int
	Tokens() int
	Report() infer.Report
	Write(ctx context.Context, span infer.Span, src []byte) error
	Pull(ctx context.Context, span infer.Span, from backend.Attached, blocks []int32) (int64, error)
	Start(first []infer.Token) (Sequence, error)
	Keep(tokens int)
	Cancel()
}

// executor is one rank, wherever it runs.
type executor interface {
	Submit(r infer.Request) (Sequence, error)
	Reserve(ctx context.Context, r infer.Request) (Reservation, error)
	Lend(tokens []int32) Export // nil: nothing is cached of them
	Load() infer.Load
	Queued() int
	LeakedBlocks() int
	Check() error
	StartProfile(ctx context.Context, r rows.ProfileRequest) (rows.ProfileWindow, error)
	StopProfile(ctx context.Context) (rows.ProfileWindow, error)
	Run(ctx context.Context) error
	Drain()
	Drained() <-chan struct{}
	// Left is called once after Run, for what the rank has not told; then Last, if any rank has counts that no row tells: it makes a row
	// of them, as of an iteration.
	Left() (list []rows.Row, carried bool, iter int64)
	Last(iter int64) []rows.Row
}

// local is a rank of this process.
type local struct {
	*engine.Engine
	*member // nil of one rank
}

func (l local) Submit(r infer.Request) (Sequence, error) {
	s, err := l.Engine.Submit(r)
	if err != nil {
		return nil, err
	}
	return sequence{s}, nil
}

func (l local) Reserve(ctx context.Context, r infer.Request) (Reservation, error) {
	h, err := l.Engine.Reserve(ctx, r)
	if err != nil {
		return nil, err
	}
	return reservation{h}, nil
}

func (l local) Lend(tokens []int32) Export {
	if x := l.Engine.Lend(tokens); x != nil {
		return x
	}
	return nil
}

type sequence struct{ *engine.Sequence }

func (s sequence) Export() Export {
	if x := s.Sequence.Export(); x != nil {
		return x
	}
	return nil
}

type reservation struct{ *engine.Reservation }

func (h reservation) Start(first []infer.Token) (Sequence, error) {
	s, err := h.Reservation.Start(first)
	if err != nil {
		return nil, err
	}
	return sequence{s}, nil
}

// distant is a rank that is a process.
type distant struct{ *remote.Engine }

func (d distant) Submit(r infer.Request) (Sequence, error) {
	s, err := d.Engine.Submit(r)
	if err != nil {
		return nil, err
	}
	return distantSequence{s}, nil
}

func (d distant) Reserve(ctx context.Context, r infer.Request) (Reservation, error) {
	h, err := d.Engine.Reserve(ctx, r)
	if err != nil {
		return nil, err
	}
	return distantReservation{h}, nil
}

func (d distant) Lend(tokens []int32) Export {
	if x := d.Engine.Lend(tokens); x != nil {
		return x
	}
	return nil
}

type distantSequence struct{ *remote.Sequence }

func (s distantSequence) Export() Export {
	if x := s.Sequence.Export(); x != nil {
		return x
	}
	return nil
}

type distantReservation struct{ *remote.Reservation }

func (h distantReservation) Start(first []infer.Token) (Sequence, error) {
	s, err := h.Reservation.Start(first)
	if err != nil {
		return nil, err
	}
	return distantSequence{s}, nil
}
