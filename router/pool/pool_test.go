package pool

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"meridian.internal/router/place"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/node"
)

type world struct {
	*Pool
	now atomic.Int64
}

func newWorld(t *testing.T, o Options) *world {
	t.Helper()
	w := &world{}
	w.now.Store(1)
	o.Now = w.now.Load
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	w.Pool = p
	return w
}

// reg is a registration in one line: role and name like "ctx0", checkpoint, load.
func reg(name, hash string, load infer.Load) node.Info {
	return node.Info{
		Name: name, Role: node.Role(name[:3]), URL: "http://" + name, State: node.Ready, Seq: 1, ClockID: clock.MakeID(1, 1),
		Model: &node.Model{Name: "m", Hash: hash}, Load: &load,
	}
}

// checkDue has every check that is due come out with err, and counts them.
func (w *world) checkDue(err error) int {
	w.now.Add(int64(checkEvery))
	due := w.due()
	for _, m := range due {
		w.checked(m, err)
	}
	return len(due)
}

func (w *world) pick(t *testing.T, a Ask) *Choice {
	t.Helper()
	a.Model = "m"
	c, err := w.Pick(a)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestRoundRobinTakesTurns(t *testing.T) {
	w := newWorld(t, Options{CtxPolicy: place.RoundRobin, GenPolicy: place.RoundRobin})
	for _, n := range []string{"ctx0", "ctx1", "gen0", "gen1", "gen2"} {
		w.Put(reg(n, "h", infer.Load{}))
	}
	var got []string
	for range 6 {
		c := w.pick(t, Ask{})
		got = append(got, c.Ctx.Name+c.Gen.Name)
		c.Release()
	}
	want := []string{"ctx0gen0", "ctx1gen1", "ctx0gen2", "ctx1gen0", "ctx0gen1", "ctx1gen2"}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestLeastLoaded(t *testing.T) {
	cases := []struct {
		name     string
		nodes    []node.Info
		ctx, gen string
	}{
		{"fewest waiting prompt tokens for ctx", []node.Info{
			reg("ctx0", "h", infer.Load{WaitingTokens: 500}), reg("ctx1", "h", infer.Load{WaitingTokens: 10, Running: 50}), reg("gen0", "h", infer.Load{}),
		}, "ctx1", "gen0"},
		{"fewest sequences for gen", []node.Info{
			reg("ctx0", "h", infer.Load{}), reg("gen0", "h", infer.Load{Running: 3, Waiting: 1}), reg("gen1", "h", infer.Load{Running: 3}),
		}, "ctx0", "gen1"},
		{"less KV in use breaks the tie", []node.Info{
			reg("ctx0", "h", infer.Load{}), reg("gen0", "h", infer.Load{Running: 1, KVUsedBlocks: 9, KVMaxBlocks: 10}),
			reg("gen1", "h", infer.Load{Running: 1, KVUsedBlocks: 1, KVMaxBlocks: 10}),
		}, "ctx0", "gen1"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, Options{})
			for _, n := range c.nodes {
				w.Put(n)
			}
			got := w.pick(t, Ask{})
			if got.Ctx.Name != c.ctx || got.Gen.Name != c.gen || got.Decision.Ctx != c.ctx || got.Decision.Gen != c.gen ||
				len(got.Decision.Candidates) != len(c.nodes) || got.Decision.Candidates[0].LoadAgeNS == nil {
				t.Errorf("got %+v", got.Decision)
			}
		})
	}
}

func TestReservationsSpreadABurst(t *testing.T) {
	w := newWorld(t, Options{})
	for _, n := range []string{"ctx0", "ctx1", "gen0", "gen1"} {
		w.Put(reg(n, "h", infer.Load{})) // the load reports know nothing of the burst yet
	}
	count := map[string]int{}
	var all []*Choice
	for range 10 {
		c := w.pick(t, Ask{Tokens: 100})
		count[c.Ctx.Name]++
		count[c.Gen.Name]++
		all = append(all, c)
	}
	for n, k := range count {
		if k != 5 {
			t.Errorf("%s got %d of 10", n, k)
		}
	}
	for _, c := range all {
		c.Ctx.PrefillDone()
		c.Release()
		c.Release() // counts once
	}
	for _, m := range w.members {
		if m.all != (use{}) || m.unseen != (use{}) || len(m.leases) != 0 {
			t.Errorf("%s: %+v, %+v, %d leases are left", m.info.Name, m.all, m.unseen, len(m.leases))
		}
	}
}

func TestOnlyPairsOfOneCheckpointAreChosen(t *testing.T) {
	w := newWorld(t, Options{})
	w.Put(reg("ctx0", "a", infer.Load{}))
	w.Put(reg("ctx1", "b", infer.Load{}))
	w.Put(reg("gen0", "b", infer.Load{Running: 90}))
	w.Put(reg("gen1", "c", infer.Load{}))
	w.PutForeign(node.RoleGen, "gen2", "http://f", "m")
	for range 4 {
		c := w.pick(t, Ask{Fallback: true})
		if c.Ctx == nil || c.Ctx.Name != "ctx1" || c.Gen.Name != "gen0" {
			t.Errorf("got %+v", c.Decision)
		}
		c.Release()
	}
	if _, err := w.Pick(Ask{Model: "m", ExcludeGen: []string{"gen0"}}); !errors.Is(err, ErrNone) {
		t.Errorf("got %v", err)
	}
	one := w.pick(t, Ask{ExcludeGen: []string{"gen0"}, Fallback: true})
	if one.Ctx != nil || one.Gen.Role != node.RoleGen {
		t.Errorf("got %+v", one.Decision)
	}
}

func TestNodesThatMayNotBeChosen(t *testing.T) {
	change := func(f func(*node.Info)) node.Info {
		i := reg("gen1", "h", infer.Load{})
		f(&i)
		return i
	}
	for name, i := range map[string]node.Info{
		"starting": change(func(i *node.Info) { i.State = node.Starting }), "draining": change(func(i *node.Info) { i.State = node.Draining }),
		"another model": change(func(i *node.Info) { i.Model.Name = "z" }), "a router": change(func(i *node.Info) { i.Role = node.RoleRouter }),
	} {
		w := newWorld(t, Options{GenPolicy: place.RoundRobin})
		w.Put(reg("ctx0", "h", infer.Load{}))
		w.Put(reg("gen0", "h", infer.Load{}))
		w.Put(i)
		for range 4 {
			if c := w.pick(t, Ask{}); c.Gen.Name != "gen0" {
				t.Errorf("%s: %s was chosen", name, c.Gen.Name)
			}
		}
	}
}

func TestSuspectsAreTheLastChoice(t *testing.T) {
	w := newWorld(t, Options{GenPolicy: place.RoundRobin})
	for _, n := range []string{"ctx0", "gen0", "gen1"} {
		w.Put(reg(n, "h", infer.Load{}))
	}
	c := w.pick(t, Ask{})
	if c.Gen.Name != "gen0" {
		t.Fatalf("got %s", c.Gen.Name)
	}
	c.Gen.Unreachable()
	for range 4 {
		if c := w.pick(t, Ask{}); c.Gen.Name != "gen1" {
			t.Errorf("a suspect was chosen")
		}
	}
	if c := w.pick(t, Ask{ExcludeGen: []string{"gen1"}}); c.Gen.Name != "gen0" {
		t.Errorf("the last node was not chosen")
	}
	again := reg("gen0", "h", infer.Load{})
	again.Seq = 2
	w.Put(again)
	seen := map[string]bool{w.pick(t, Ask{}).Gen.Name: true, w.pick(t, Ask{}).Gen.Name: true}
	if !seen["gen0"] {
		t.Error("a renewal did not clear the suspicion")
	}
}

func TestALostNodeTellsItsLegs(t *testing.T) {
	for name, lose := range map[string]func(w *world){
		"its lease ended and it refuses connections": func(w *world) {
			w.Apply(node.Event{Kind: node.Lost, Info: reg("gen0", "h", infer.Load{})})
			w.checkDue(fmt.Errorf("dial: %w", syscall.ECONNREFUSED))
		},
		"its lease ended and it does not answer": func(w *world) {
			w.Apply(node.Event{Kind: node.Lost, Info: reg("gen0", "h", infer.Load{})})
			w.checkDue(context.DeadlineExceeded)
			w.checkDue(context.DeadlineExceeded)
		},
		"it left":         func(w *world) { w.Apply(node.Event{Kind: node.Left, Info: reg("gen0", "h", infer.Load{})}) },
		"it is restarted": func(w *world) { i := reg("gen0", "h", infer.Load{}); i.ClockID = clock.MakeID(1, 2); w.Put(i) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, Options{BusUp: func() bool { return true }})
			w.Put(reg("ctx0", "h", infer.Load{}))
			w.Put(reg("gen0", "h", infer.Load{}))
			a, b, done := w.pick(t, Ask{}), w.pick(t, Ask{}), w.pick(t, Ask{})
			var told []error
			a.Gen.Watch(gone(func(err error) { told = append(told, err); a.Release() }))
			b.Gen.Watch(gone(func(error) { t.Error("a watch that was stopped was called") }))
			b.Gen.Unwatch()
			done.Release()
			done.Gen.Watch(gone(func(error) { t.Error("a released lease was called") }))
			lose(w)
			if len(told) != 1 || !errors.Is(told[0], ErrGone) || a.Ctx.cause != nil {
				t.Errorf("told %v", told)
			}
			late := 0
			b.Gen.Watch(gone(func(error) { late++ }))
			if late != 1 {
				t.Error("a watch that comes late is not called")
			}
		})
	}
}

type gone func(error)

func (f gone) Gone(cause error) { f(cause) }

// TestALoadedNodeKeepsItsLegs: one that renews its lease too late, but answers its health check, is not dead.
func TestALoadedNodeKeepsItsLegs(t *testing.T) {
	w := newWorld(t, Options{BusUp: func() bool { return true }})
	for _, n := range []string{"ctx0", "gen0", "gen1"} {
		w.Put(reg(n, "h", infer.Load{}))
	}
	c := w.pick(t, Ask{ExcludeGen: []string{"gen1"}})
	c.Gen.Watch(gone(func(err error) { t.Errorf("its leg was told %v", err) }))
	w.Apply(node.Event{Kind: node.Lost, Info: reg("gen0", "h", infer.Load{})})
	for i, err := range []error{nil, context.DeadlineExceeded, nil, context.DeadlineExceeded} { // never two failures in a row
		if n := w.checkDue(err); n != 1 {
			t.Fatalf("%d nodes are checked in round %d, want the one whose lease ended", n, i)
		}
	}
	for range 3 {
		if got := w.pick(t, Ask{}).Gen.Name; got != "gen1" {
			t.Errorf("new work goes to %s, whose lease ended", got)
		}
	}
	if got := w.pick(t, Ask{ExcludeGen: []string{"gen1"}}).Gen.Name; got != "gen0" {
		t.Errorf("the last node is not used, but %s", got)
	}
	again := reg("gen0", "h", infer.Load{})
	again.Seq = 2
	w.Apply(node.Event{Kind: node.Joined, Info: again})
	if n := w.checkDue(nil); n != 0 {
		t.Errorf("%d nodes are checked, though all leases hold", n)
	}
	late := reg("gen0", "h", infer.Load{}) // the end of a lease that was renewed since
	w.Apply(node.Event{Kind: node.Lost, Info: late})
	if n := w.checkDue(nil); n != 0 {
		t.Error("an old end of the lease is believed")
	}
}

func TestOldRegistrationsAreIgnored(t *testing.T) {
	w := newWorld(t, Options{})
	i := reg("gen0", "h", infer.Load{Running: 5})
	i.Seq = 9
	w.Put(i)
	old := reg("gen0", "h", infer.Load{Running: 1})
	old.Seq = 8
	w.Put(old)
	if s := w.Snapshot(); s[0].Info.Load.Running != 5 {
		t.Errorf("got %+v", s[0].Info.Load)
	}
}

func TestReady(t *testing.T) {
	w := newWorld(t, Options{})
	if err := w.Ready(false, true); err == nil {
		t.Error("ready without nodes")
	}
	w.Put(reg("ctx0", "h", infer.Load{}))
	if w.Ready(false, true) != nil || w.Ready(true, false) != nil {
		t.Error("one node can serve aggregated")
	}
	if err := w.Ready(false, false); err == nil || !strings.Contains(err.Error(), "0 of 0 gen") {
		t.Errorf("got %v", err)
	}
	w.Put(reg("gen0", "h", infer.Load{}))
	if err := w.Ready(false, false); err != nil {
		t.Error(err)
	}
}

func TestNewRefuses(t *testing.T) {
	for _, o := range []Options{
		{CtxPolicy: "x"}, {GenPolicy: "x"}, {Static: []Static{{Role: node.RoleCtx, URL: "x"}}}, {Static: []Static{{Role: node.RoleRouter, URL: "http://h"}}},
	} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}

// workers are static workers by their hosts, which are asked without a network: none of them is late.
type workers map[string]*worker

// worker is one whose answers a test changes.
type worker struct {
	info string // of /server_info
	up   bool
	mute bool // it gives no answer to /server_info
}

func (ws workers) RoundTrip(r *http.Request) (*http.Response, error) {
	w, k := httptest.NewRecorder(), ws[r.URL.Host]
	switch {
	case k == nil:
		return nil, syscall.ECONNREFUSED
	case !k.up:
		w.WriteHeader(http.StatusInternalServerError)
	case r.URL.Path == "/server_info" && k.mute:
		return nil, context.DeadlineExceeded
	case r.URL.Path == "/server_info":
		fmt.Fprint(w, k.info)
	case r.URL.Path == "/v1/models":
		fmt.Fprint(w, `{"data":[{"id":"m"}]}`)
	}
	return w.Result(), nil
}

// static are options of a pool with these workers, each with a host like "ctx".
func (ws workers) static(o Options) Options {
	o.Client = &http.Client{Transport: ws}
	for _, host := range slices.Sorted(maps.Keys(ws)) {
		o.Static = append(o.Static, Static{Role: node.Role(host[:3]), URL: "http://" + host + "/"})
	}
	return o
}

// round checks what is due.
func (w *world) round(t *testing.T) {
	for _, m := range w.due() {
		w.check(t.Context(), m)
	}
	w.now.Add(int64(time.Second))
}

const ourInfo = `{"role":"ctx","name":"ctx9","model":{"name":"m","hash":"h","context_len":9},"load":{"running":3},"disaggregated_params":{"ctx_info_endpoint":["tcp://h:7"]}}`

func TestStaticNodesComeAndGo(t *testing.T) {
	ctx := &worker{info: ourInfo}
	w := newWorld(t, workers{"ctx": ctx}.static(Options{}))
	w.round(t)
	if w.Ready(true, true) == nil {
		t.Fatal("a node that is down is used")
	}
	if why := w.Snapshot()[0].Why; !strings.Contains(why, "/health: status 500") {
		t.Errorf("why it is not used: %q, want the failed check", why)
	}
	ctx.up = true
	w.round(t)
	s := w.Snapshot()[0]
	if s.Foreign || s.Info.KVAddr != "h:7" || s.Info.Model.Hash != "h" || s.Info.Load.Running != 3 || s.Info.State != node.Ready || s.Info.URL != "http://ctx" || s.Info.Name != "ctx9" {
		t.Fatalf("got %+v", s)
	}
	c := w.pick(t, Ask{Aggregated: true})
	told := 0
	c.Gen.Watch(gone(func(error) { told++ }))
	ctx.up = false
	w.round(t)
	if told != 0 {
		t.Error("one failed check made the node gone")
	}
	w.round(t)
	if told != 1 || w.Ready(true, true) == nil {
		t.Errorf("after %d failed checks: told %d times", maxFailures, told)
	}
	ctx.up = true
	w.round(t)
	if err := w.Ready(true, true); err != nil {
		t.Errorf("it came back: %v", err)
	}
	if why := w.Snapshot()[0].Why; why != "" {
		t.Errorf("a node that came back is said not to be used: %s", why)
	}
}

// Legs go to /v1/... of a host: what else a URL says would be left out.
func TestStaticURLsNameAHost(t *testing.T) {
	for _, bad := range []string{"", "h:1", "ftp://h:1", "http://", "http://h:1/llm", "http://h:1?a=b", "http://h:1#a", "http://u:p@h:1"} {
		if _, err := New(Options{Now: func() int64 { return 1 }, Static: []Static{{Role: node.RoleGen, URL: bad}}}); err == nil || !strings.Contains(err.Error(), "http://host:port") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := New(Options{Now: func() int64 { return 1 }, Static: []Static{{Role: node.RoleGen, URL: "https://h:1/"}}}); err != nil {
		t.Error(err)
	}
}

func TestANodeOfOursThatWasSlowOnceIsNotForeign(t *testing.T) {
	ctx := &worker{info: ourInfo, up: true, mute: true}
	w := newWorld(t, workers{"ctx": ctx}.static(Options{}))
	w.round(t)
	if s := w.Snapshot()[0]; s.Info.State == node.Ready {
		t.Errorf("it is taken though it has not said who it is: %+v", s)
	}
	for _, mute := range []bool{false, true, false} {
		ctx.mute = mute
		w.round(t)
		if s := w.Snapshot()[0]; s.Foreign || s.Info.Model == nil || s.Info.Model.Hash != "h" {
			t.Errorf("no answer to /server_info: %v; then it is %+v", mute, s)
		}
	}
}

func TestAStaticNodeThatIsRegisteredTooIsOneNode(t *testing.T) {
	w := newWorld(t, workers{"ctx": {info: ourInfo, up: true}}.static(Options{}))
	w.Put(reg("ctx9", "h", infer.Load{}))
	w.round(t)
	if n := len(w.models["m"][0].sides[0].nodes); n != 1 {
		t.Errorf("%d entries can be chosen", n)
	}
	w.Drop(node.RoleCtx, "ctx9", "it left the registry")
	if n := len(w.models["m"][0].sides[0].nodes); n != 1 {
		t.Errorf("%d entries can be chosen after it left the registry", n)
	}
}

const foreignInfo = `{"disaggregated_params":{"ctx_dp_rank":0}}`

func TestForeignStaticNodes(t *testing.T) {
	w := newWorld(t, workers{"gen": {info: foreignInfo, up: true}}.static(Options{}))
	w.round(t)
	if s := w.Snapshot()[0]; !s.Foreign || s.Info.Model.Name != "m" || s.Info.State != node.Ready {
		t.Errorf("got %+v", s)
	}
	if hash, _ := w.Source("m"); hash != "" {
		t.Errorf("a foreign worker is asked for its tokenizer")
	}
}

func TestForeignWorkersAreProbedUnlessTheyAreTrusted(t *testing.T) {
	for _, trust := range []bool{false, true} {
		both := workers{"ctx": {info: foreignInfo, up: true}, "gen": {info: foreignInfo, up: true}}
		w := newWorld(t, both.static(Options{Qualify: true, TrustForeign: trust}))
		w.round(t)
		if n, err := len(w.Due(false, false)), w.Ready(false, false); (n == 0) != trust || (err == nil) != trust {
			t.Errorf("trusted %v: %d probes are due, ready: %v", trust, n, err)
		}
		w.Put(reg("ctx0", "h", infer.Load{}))
		w.Put(reg("gen0", "h", infer.Load{}))
		if n := len(w.Due(false, false)); n == 0 {
			t.Errorf("trusted %v: no probe of nodes of ours", trust)
		}
	}
}

func TestRegisteredNodesAreCheckedWhileTheBusIsDown(t *testing.T) {
	up := true
	w := newWorld(t, Options{BusUp: func() bool { return up }})
	w.Put(reg("gen0", "h", infer.Load{}))
	if n := len(w.due()); n != 0 {
		t.Errorf("%d checks while the bus is up", n)
	}
	up = false
	if n := len(w.due()); n != 1 {
		t.Errorf("%d checks while the bus is down", n)
	}
	if n := len(w.due()); n != 0 {
		t.Error("a check that runs is started again")
	}
}

func TestTheDecisionNamesTheBestCandidates(t *testing.T) {
	w := newWorld(t, Options{})
	w.Put(reg("ctx0", "h", infer.Load{}))
	for i := range 20 {
		w.Put(reg(fmt.Sprintf("gen%02d", i), "h", infer.Load{Running: (i*7 + 3) % 20}))
	}
	c := w.pick(t, Ask{}).Decision.Candidates[1:]
	if len(c) != maxCandidates {
		t.Fatalf("%d candidates", len(c))
	}
	for i := range c {
		if c[i].Score != float64(i) {
			t.Errorf("candidate %d has score %v", i, c[i].Score)
		}
	}
}
