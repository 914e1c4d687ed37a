package pool

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"meridian.internal/router/place"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/node"
)

// large is a cluster of more pairs than are probed: 2 context nodes and 40 generation nodes.
func large(t *testing.T) *world {
	t.Helper()
	w := newWorld(t, Options{Qualify: true})
	for i := range 2 {
		w.Put(reg(fmt.Sprintf("ctx%d", i), "h", infer.Load{}))
	}
	for i := range 40 {
		w.Put(reg(fmt.Sprintf("gen%02d", i), "h", infer.Load{}))
	}
	return w
}

// probe lets so many seconds pass and has all that is due probed.
func (w *world) probe(seconds int, bad string) {
	for range seconds {
		w.now.Add(1e9)
		for _, b := range w.Due(false, false) {
			var err error
			if b.Ctx != nil && b.Ctx.Name == bad {
				err = errors.New("it is broken")
			}
			w.Probed(b, Result{Err: err})
		}
	}
}

// In a large cluster a node that is well is proven though its first peer is not, and again when it is restarted.
func TestNodesOfALargeClusterAreProvenByAnyPeer(t *testing.T) {
	w := large(t)
	w.probe(60, "ctx1")
	for _, s := range w.Snapshot() {
		if s.Info.Role == node.RoleGen && !s.Qualified {
			t.Errorf("%s is not proven, though ctx0 is well: %s", s.Info.Name, s.Why)
		}
	}
	w = large(t)
	w.probe(10, "")
	again := reg("gen20", "h", infer.Load{})
	again.ClockID = clock.MakeID(1, 77)
	w.Put(again)
	w.probe(60, "")
	for _, s := range w.Snapshot() {
		if !s.Qualified {
			t.Errorf("%s is not proven after a restart of gen20: %s", s.Info.Name, s.Why)
		}
	}
}

// A worker does not choose whom this router asks.
func TestARedirectOfAWorkerIsNotFollowed(t *testing.T) {
	var hits atomic.Int64
	internal := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		hits.Add(1)
	}))
	defer internal.Close()
	rogue := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		http.Redirect(rw, r, internal.URL+"/latest/meta-data/?delete=everything", http.StatusFound)
	}))
	defer rogue.Close()
	w := newWorld(t, Options{Static: []Static{{node.RoleGen, rogue.URL}}})
	for _, m := range w.due() {
		w.check(context.Background(), m)
	}
	if hits.Load() > 0 {
		t.Errorf("it was followed %d times", hits.Load())
	}
}

// A load that no node can have harms nobody.
func TestALoadBelowNothing(t *testing.T) {
	w := newWorld(t, Options{CtxPolicy: place.Conversation, GenPolicy: place.Conversation})
	w.Put(reg("ctx0", "h", infer.Load{}))
	w.Put(reg("gen0", "h", infer.Load{Running: -1 << 40}))
	if _, err := w.Pick(Ask{Model: "m", Tokens: 10, Conversation: "x"}); err != nil {
		t.Error(err)
	}
}

// Two entries of another router have one name, as of a static node that is registered too: the last counts, and goes.
func TestANodeThatIsToldOfTwiceLeaksNothing(t *testing.T) {
	b := newWorld(t, Options{})
	b.Put(reg("ctx0", "h", infer.Load{}))
	b.Put(reg("gen0", "h", infer.Load{}))
	u := use{GenLegs: 1, GenTokens: 10}
	for i := range 10 {
		b.Others(Share{Router: "a", Epoch: "e", Seq: int64(i + 1), Full: true, Nodes: []ShareNode{{node.RoleGen, "gen0", u}, {node.RoleGen, "gen0", u}}})
	}
	b.Others(Share{Router: "a", Epoch: "e", Seq: 100, Full: true})
	b.now.Add(int64(peerExpires) * 2)
	b.tidy()
	for _, s := range b.Snapshot() {
		if s.OthersReserved != 0 {
			t.Errorf("%s: %d reserved by others, of which there are none", s.Info.Name, s.OthersReserved)
		}
	}
}

// A node is killed; one of another name comes at its address before anybody looked. Its health is no sign of life of the first.
func TestANodeWhoseAddressAnotherHasIsGone(t *testing.T) {
	for _, first := range []string{"lapse", "join"} {
		w := newWorld(t, Options{BusUp: func() bool { return true }})
		old, young := reg("gen0", "h", infer.Load{}), reg("gen1", "h", infer.Load{})
		young.URL, young.ClockID = old.URL, clock.MakeID(1, 9)
		w.Put(old)
		if first == "join" {
			w.Put(young)
		}
		w.Apply(node.Event{Kind: node.Lost, Info: old})
		if first == "lapse" {
			w.Put(young)
		}
		for range 100 {
			w.checkDue(nil) // gen1 answers
		}
		if n := len(w.Snapshot()); n != 1 {
			t.Errorf("%s first: %d members, one process lives", first, n)
		}
	}
}
