// Package backendtest owns the conformance suite of gpu/backend: what every back end promises to the executor, whatever
// device it runs on. It knows no model: it compares a back end with itself, under other chunks, batches, slots, blocks and
// stages. It measures no speed.
package backendtest

import (
	"reflect"
	"testing"

	"meridian.internal/gpu/backend"
)

// Options say how to make the back end under test. It needs at least 64 KV blocks, 8 slots, a context of 256 tokens and
// a vocabulary of 64; small models make the suite quick.
type Options struct {
	// Open makes a back end of a stage; the zero Stage is all layers. The suite closes it.
	Open func(t *testing.T, stage backend.Stage) backend.Backend
	// Stages says that Open can make a part of the layers.
	Stages bool
	// Inexact says that other chunks or batches may change the last bits, so equal texts are not promised.
	Inexact bool
}

// Run runs the suite.
func Run(t *testing.T, o Options) {
	tests := []struct {
		name  string
		test  func(*driver)
		exact bool // needs equal bits under another shape of the work
	}{
		{"Info describes a usable device", infoIsUsable, false},
		{"a token that was fed back inside the device equals one that the host gave", feedback, false},
		{"chunks of a prompt do not change the text", chunks, true},
		{"slot, blocks and company in the batch do not change the text", company, true},
		{"several wanted positions give what each alone gives", positions, true},
		{"an entry without wanted positions samples nothing", noPositions, false},
		{"a shorter KV length takes tokens back", truncate, true},
		{"a mask holds for every sampled position", masks, false},
		{"a mask without a token fails its own sequence only", emptyMask, false},
		{"a seed gives the same text in any slot and batch", seeds, true},
		{"penalties resume from history", penalties, true},
		{"log probabilities are sorted and belong to the token", logprobs, false},
		{"a slot forgets what it held before", reuseSlot, true},
		{"KV that was copied out and in continues the text", moveKV, false},
		{"parts of a region are the parts of its canonical layout", layout, false},
		{"a block copied inside the device continues the text", blockCopy, false},
		{"LayerDone rises to the last layer before the step is done", layerDone, false},
		{"Submit returns while the device is busy", submitReturns, false},
		{"copies run beside compute", copyBeside, false},
		{"steps end in order and their stamps do not overlap", order, false},
		{"Close runs what is queued", closeDrains, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.exact && o.Inexact {
				t.Skip("the back end does not promise equal bits for other shapes of the work")
			}
			tt.test(newDriver(t, o.Open(t, backend.Stage{})))
		})
	}
	t.Run("two stages give what one device gives", func(t *testing.T) {
		if !o.Stages {
			t.Skip("the back end has no stages")
		}
		stages(t, o)
	})
}

func infoIsUsable(d *driver) {
	i := d.info
	if !reflect.DeepEqual(i, d.b.Info()) {
		d.t.Error("Info changes")
	}
	if i.KVBlocks < 64 || i.MaxSlots < 8 || i.ContextLen < 256 || i.Vocab < 64 {
		d.t.Errorf("too small for the suite: %d blocks, %d slots, context %d, vocabulary %d", i.KVBlocks, i.MaxSlots, i.ContextLen, i.Vocab)
	}
	if i.Layers < 1 || i.Stage != (backend.Stage{End: i.Layers}) || i.KVHeads < 1 || i.HeadSize < 1 || i.TokensPerBlock < 1 {
		d.t.Errorf("shape %+v makes no sense", i)
	}
	if backend.ElementSize(i.KVType) == 0 || i.Device == "" || i.ModelHash == "" || i.Numerics == "" || i.RoPE == "" || i.DeviceClock == "" {
		d.t.Errorf("%+v leaves a name empty or has an unknown KV type", i)
	}
}
