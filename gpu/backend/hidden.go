package backend

import "fmt"

// Hidden are the hidden states of a step on their way from one stage to the next: (rows of all entries, Info.Hidden) in
// float32, where the stage that made them has put them. A stage takes those of its own kind of device.
type Hidden interface {
	// Len is the number of values.
	Len() int
	// Release gives their memory back. It is called once, after the step that takes them in.
	Release()
}

// HostHidden are hidden states in the host's memory, which the garbage collector takes back.
type HostHidden []float32

// Len implements Hidden.
func (h HostHidden) Len() int { return len(h) }

// Release implements Hidden.
func (HostHidden) Release() {}

// HiddenOf gives what a stage takes in for a batch of so many rows, nothing at layer 0. Hidden states of another kind or
// number are refused.
func HiddenOf[H Hidden](b *Batch, info *Info, rows int) (h H, err error) {
	if info.Stage.First == 0 {
		return h, nil
	}
	h, ok := b.Hidden.(H)
	switch {
	case !ok:
		return h, fmt.Errorf("hidden states of kind %T, want %T", b.Hidden, h)
	case h.Len() != rows*info.Hidden:
		return h, fmt.Errorf("%d hidden values for %d rows of %d", h.Len(), rows, info.Hidden)
	}
	return h, nil
}
