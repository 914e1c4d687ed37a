package chaos

import (
	"encoding/json"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

// timed is the part of a line that says when things happened.
type timed struct {
	client.Line
	Spans struct {
		Name  []string
		GapNS []int64 `json:"gap_ns"`
		DurNS []int64 `json:"dur_ns"`
	}
	Phases []struct {
		Role   string
		Stamps []stamp `json:"stamps_ns"`
	}
}

// Places in the row of stamps (docs/timeline.md).
const (
	firstToken = 3
	lastToken  = 5
)

// stamp is ns after the start of the request on the router's clock, nil for none; with the raw one beside it where it does not follow.
type stamp struct{ NS *int64 }

func (s *stamp) UnmarshalJSON(b []byte) error {
	if b[0] != '[' {
		return json.Unmarshal(b, &s.NS)
	}
	var both []*int64
	if err := json.Unmarshal(b, &both); err != nil {
		return err
	}
	if len(both) != 2 {
		return errors.New("a stamp has two parts")
	}
	s.NS = both[0]
	return nil
}

// of is a stamp of the last phase of a role.
func (l *timed) of(t *testing.T, role string, i int) int64 {
	t.Helper()
	var at *int64
	for _, p := range l.Phases {
		if p.Role == role && i < len(p.Stamps) {
			at = p.Stamps[i].NS
		}
	}
	if at == nil {
		t.Fatalf("no stamp %d of %s", i, role)
	}
	return *at
}

// timed gives the whole line of a request.
func (r *rig) timed(t *testing.T, c *client.Client, id string) (l timed) {
	t.Helper()
	if _, err := c.Whole(r.ctx, id); err != nil {
		t.Fatal(err)
	}
	if err := c.Get(r.ctx, "/timelines/"+id, &l); err != nil {
		t.Fatal(err)
	}
	if !l.Complete || l.TTFTNS == nil || l.E2ENS == nil {
		t.Fatalf("%s: complete %v, missing %v", id, l.Complete, l.Missing)
	}
	return l
}

// ends gives the ends of the spans, and whether they are the whole request.
func (l *timed) ends() (list []int64) {
	at := int64(0)
	for i, d := range l.Spans.DurNS {
		if i < len(l.Spans.GapNS) {
			at += l.Spans.GapNS[i]
		}
		at += d
		list = append(list, at)
	}
	return list
}

// TestTheTTFTOfASimulatedDeviceHoldsAllItsParts: the client's first token comes no earlier than prefill and the copies of KV take on the simulated device,
// in every style, and the spans before it end with it.
func TestTheTTFTOfASimulatedDeviceHoldsAllItsParts(t *testing.T) {
	const (
		tokens   = 200
		step     = 5 * time.Millisecond
		token    = 500 * time.Microsecond
		byteTime = 20 * time.Nanosecond // of a copy in or out
		prefill  = step + tokens*token
	)
	styles := []string{"generation_first", "context_first", "aggregated"}
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, NoClocksync: true, Schedules: styles, NodeArgs: append(slowSim(), fmt.Sprintf("--sim-copy-byte=%d", byteTime))})
	for i, style := range styles {
		t.Run(style, func(t *testing.T) {
			c := client.New(r.Routers[i].URL, 1)
			defer c.Close()
			f := fields(tokens, 3)
			f["prompt"].([]int)[0] += i // nothing of it is cached
			res, err := c.Do(r.ctx, client.Request{ID: style, Fields: f})
			if err != nil {
				t.Fatal(err)
			}
			l := r.timed(t, c, style)
			ttft := time.Duration(*l.TTFTNS)
			least := prefill
			if style == "context_first" { // KV leaves when prefill is over
				if l.Handover == nil || l.Handover.Bytes == 0 {
					t.Fatalf("no KV was handed over: %+v", l.Handover)
				}
				least += time.Duration(l.Handover.Bytes) * byteTime
			}
			seen, ok := res.TTFT()
			t.Logf("the client's TTFT %v, the line's %v, of the device at least %v", seen, ttft, least)
			if ttft < least || !ok || seen < ttft {
				t.Errorf("the client's TTFT is %v, the line's %v; want rising, and at least %v", seen, ttft, least)
			}
			closed := false
			for _, end := range l.ends() {
				closed = closed || end == *l.TTFTNS
			}
			if !closed {
				t.Errorf("no span ends with the first token, at %d ns: %v of %v", *l.TTFTNS, l.ends(), l.Spans.Name)
			}
		})
	}
}

// TestTheGapBetweenTwoHostsTokensIsNotNegative: the first token is of a context node whose clock runs fast, the second of a generation node whose clock is an
// hour behind. Between them lies at least the step that made the second.
func TestTheGapBetweenTwoHostsTokensIsNotNegative(t *testing.T) {
	const step = 5 * time.Millisecond // of slowSim
	r := start(t, cluster.Config{Ctx: 1, Gen: 1, RouterArgs: []string{"--schedule=generation_first"}, Places: map[string]cluster.Place{
		"ctx0": {Args: []string{"--fault-clock-skew-ppm=200"}},
		"gen0": {Args: []string{"--fault-clock-step=-1h", "--fault-clock-step-after=1ns"}},
	}})
	var view struct {
		Nodes []struct {
			Name  string
			Clock struct {
				OffsetNS *int64 `json:"offset_ns"`
			}
		}
	}
	r.poll(t, 20*time.Second, "the clocks are not known", func() bool {
		if err := r.client.Get(r.ctx, "/cluster", &view); err != nil {
			t.Fatal(err)
		}
		known := 0
		for _, n := range view.Nodes {
			if n.Clock.OffsetNS == nil {
				continue
			}
			if known++; n.Name == "gen0" && time.Duration(*n.Clock.OffsetNS).Round(time.Minute) != time.Hour {
				t.Fatalf("the clock of gen0 is %v behind, want an hour", time.Duration(*n.Clock.OffsetNS))
			}
		}
		return known == 2
	})
	for i := range 20 {
		id := fmt.Sprintf("gap-%d", i)
		if _, err := r.client.Do(r.ctx, client.Request{ID: id, Fields: fields(20+i, 2)}); err != nil {
			t.Fatal(err)
		}
		l := r.timed(t, r.client, id)
		if l.MaxBoundNS == nil || len(l.Violations) > 0 {
			t.Fatalf("%s: bound %v, violations %v", id, l.MaxBoundNS, l.Violations)
		}
		gap := time.Duration(l.of(t, "gen", lastToken) - l.of(t, "ctx", firstToken))
		if bound := 2 * time.Duration(*l.MaxBoundNS); gap < step-bound || gap > time.Duration(*l.E2ENS)+bound {
			t.Errorf("%s: the second token came %v after the first, by clocks within %v; want at least %v, at most the %v of the request", id, gap, bound, step, time.Duration(*l.E2ENS))
		}
	}
}

// TestARouterThatIsKilledLeavesNoLoadAndComesBackToThatOfTheNodes: what a dead router had reserved is soon forgotten by the other, and a new process in its
// place knows what the nodes have from others.
func TestARouterThatIsKilledLeavesNoLoadAndComesBackToThatOfTheNodes(t *testing.T) {
	e := natsServer(t, "127.0.0.1:0", t.TempDir())
	t.Cleanup(e.Close)
	r := start(t, cluster.Config{
		Ctx: 1, Gen: 2, NATS: e.URL(), NoClocksync: true, Schedules: []string{"context_first", "generation_first"},
		NodeArgs: []string{"--sim-step=50ms", "--sim-prefill-token=5ms", "--sim-shallow"}, RouterArgs: []string{"--policy=least_loaded"},
	})
	first, second := r.Routers[0], r.Routers[1]
	other := &rig{Cluster: r.Cluster, client: client.New(second.URL, 64), ctx: r.ctx}
	t.Cleanup(other.client.Close)
	reserved := func() (n int) { // by the first, as the second knows
		for _, v := range other.nodes(t) {
			if v.Role == "gen" {
				n += v.Others
			}
		}
		return n
	}
	for i := range 4 { // their prompts take seconds: the places on generation nodes are reserved, and these do not know
		f := r.send(fmt.Sprintf("lost-%d", i), fields(900+i, 5))
		defer f.cancel()
	}
	r.poll(t, 20*time.Second, "the second router does not hear of 4 reservations", func() bool { return reserved() == 4 })
	kill(t, first)
	r.poll(t, 20*time.Second, "what the dead router had reserved is not forgotten", func() bool { return reserved() == 0 })

	gen1 := r.Find("gen1")
	kill(t, gen1)
	for i := range 6 {
		f := other.send(fmt.Sprintf("long-%d", i), fields(20+i, 1500))
		f.begins(t)
		defer f.cancel()
	}
	for _, p := range []*cluster.Process{gen1, first} {
		if err := r.Restart(r.ctx, p); err != nil {
			t.Fatal(err)
		}
	}
	r.poll(t, 30*time.Second, "the new process does not see both generation nodes", func() bool {
		ready := 0
		for _, v := range r.nodes(t) {
			if v.Role == "gen" && v.State == "ready" && v.Qualified {
				ready++
			}
		}
		return ready == 2
	})
	for i := range 4 {
		id := fmt.Sprintf("new-%d", i)
		r.ok(t, id)
		if l, err := r.client.Timeline(r.ctx, id); err != nil || l.Node("gen") != "gen1" {
			t.Errorf("%s ran on %s, %v; gen0 has 6 long streams of the other router", id, l.Node("gen"), err)
		}
	}
	for _, v := range r.nodes(t) {
		if v.Name == "gen0" && v.Load.Running != 6 {
			t.Errorf("gen0 runs %d streams, want the 6 long ones: the test was too slow", v.Load.Running)
		}
	}
}

func kill(t *testing.T, p *cluster.Process) {
	t.Helper()
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ended(t, p)
}
