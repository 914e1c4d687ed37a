package backend

import (
	"errors"
	"sync"
	"testing"
)

func TestWorkIsDoneInOrderAndNoneIsLostWhenTheInboxEnds(t *testing.T) {
	in := NewInbox()
	var order []int64
	var device sync.WaitGroup
	device.Go(func() {
		for s, ok := in.Steps.Pop(); ok; s, ok = in.Steps.Pop() {
			order = append(order, s.Batch.Iter)
			s.Step.Finish()
		}
	})
	const n = 1000
	steps := make([]*Step, n)
	for i := range steps {
		steps[i] = in.Submit(&Batch{Iter: int64(i)})
	}
	in.End()
	in.End() // again: harmless
	device.Wait()
	if len(order) != n {
		t.Fatalf("%d of %d steps have run", len(order), n)
	}
	for i, s := range steps {
		<-s.Done()
		if order[i] != int64(i) || s.Err != nil {
			t.Fatalf("step %d ran as number %d, %v", order[i], i, s.Err)
		}
	}
}

func TestWhatComesAfterTheEndIsRefused(t *testing.T) {
	in := NewInbox()
	in.End()
	s, out, back := in.Submit(&Batch{Iter: 7}), in.CopyOut(nil, nil), in.CopyIn(nil, nil)
	<-s.Done()
	<-out.Done()
	<-back.Done()
	for _, err := range []error{s.Err, out.Err, back.Err} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("%v, want %v", err, ErrClosed)
		}
	}
	if s.Iter != 7 {
		t.Errorf("the step is of iteration %d", s.Iter)
	}
}

func TestACopySaysWhenItRanAndHowItCameOut(t *testing.T) {
	at, broken := int64(0), errors.New("broken")
	j := CopyJob{Regions: []Region{{Block: 3}}, Buf: []byte{1}, Copy: NewCopy()}
	j.Run(func() int64 { at++; return at }, func(r []Region, b []byte) error {
		if len(r) != 1 || r[0].Block != 3 || len(b) != 1 {
			t.Errorf("regions %v, %d bytes", r, len(b))
		}
		return broken
	})
	<-j.Copy.Done()
	if j.Copy.StartNS != 1 || j.Copy.EndNS != 2 || !errors.Is(j.Copy.Err, broken) {
		t.Errorf("%+v", j.Copy)
	}
}
