package main

import (
	"errors"
	"testing"

	"meridian.internal/router/proxy"
)

func TestReadyWaitsForClocksButNotForever(t *testing.T) {
	var r readiness
	offset := int64(0)
	known := &proxy.ClusterClock{OffsetNS: &offset}
	nodes := []proxy.ClusterNode{{Name: "ctx0", State: "ready", Clock: known}, {Name: "gen0", State: "ready", Clock: &proxy.ClusterClock{State: "joining"}}}
	list := func() []proxy.ClusterNode { return nodes }
	none := errors.New("no pair")
	if err := r.check(100, none, list); !errors.Is(err, none) {
		t.Errorf("nothing can be placed: %v", err)
	}
	if r.check(200, nil, list) == nil {
		t.Error("ready though a clock is not known")
	}
	nodes[1].Clock = known
	if err := r.check(300, nil, list); err != nil {
		t.Errorf("all clocks are known: %v", err)
	}
	nodes[1] = proxy.ClusterNode{Name: "gen0", State: "ready", Static: true, Clock: &proxy.ClusterClock{}}
	if err := r.check(400, nil, list); err != nil {
		t.Errorf("a static worker may have no clock: %v", err)
	}
	nodes[1].Static = false
	if err := r.check(200+clockWait.Nanoseconds(), nil, list); err != nil {
		t.Errorf("a clock that stays unknown: %v", err)
	}
}
