package remote

import (
	"context"
	"errors"
	"io"

	"meridian.internal/gpu/engine"
	"meridian.internal/shared/rows"
)

// ErrGone is the error of a rank whose process is gone or hangs; the text names the rank.
var ErrGone = errors.New("remote: rank is gone")

// fault is an error on its way. The errors that others tell apart keep what they are.
type fault struct {
	Text string
	Is   []int // of known
}

// known are the errors that travel as what they are. Both processes are of one program: the order is no contract.
var known = [...]error{
	engine.ErrStopped, engine.ErrQueueFull, engine.ErrDraining, engine.ErrTooLong, engine.ErrInvalid, engine.ErrCancelled,
	engine.ErrDeadline, engine.ErrNoToken, engine.ErrHung, rows.ErrProfileBusy, rows.ErrProfileInvalid, rows.ErrProfileNone, io.EOF,
	context.Canceled, context.DeadlineExceeded,
}

func faultOf(err error) *fault {
	if err == nil {
		return nil
	}
	f := &fault{Text: err.Error()}
	for i, k := range known {
		if errors.Is(err, k) {
			f.Is = append(f.Is, i)
		}
	}
	return f
}

// error gives it back; nil stays nil.
func (f *fault) error() error {
	if f == nil {
		return nil
	}
	var is []error
	for _, i := range f.Is {
		if i < 0 || i >= len(known) {
			continue
		}
		if f.Text == known[i].Error() {
			return known[i] // io.EOF is compared, not unwrapped
		}
		is = append(is, known[i])
	}
	return &distant{f.Text, is}
}

// distant is an error of another process.
type distant struct {
	text string
	is   []error
}

func (d *distant) Error() string   { return d.text }
func (d *distant) Unwrap() []error { return d.is }
