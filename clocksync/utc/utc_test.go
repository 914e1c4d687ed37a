package utc

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/beevik/ntp"

	"meridian.internal/shared/clock"
)

// fake is an NTP server whose UTC is known: the wall time of the process, off by lie.
type fake struct {
	lie     time.Duration
	delay   time.Duration // one way
	refID   uint32
	stratum uint8
	poll    time.Duration
	kiss    string
	err     error
}

func (f fake) answer(o ntp.QueryOptions) (*ntp.Response, error) {
	if f.err != nil {
		return nil, f.err
	}
	t1 := o.GetSystemTime()
	time.Sleep(f.delay)
	t2 := time.Now().Add(f.lie)
	t3 := t2
	time.Sleep(f.delay)
	t4 := o.GetSystemTime()
	return &ntp.Response{
		Version: 4, Stratum: f.stratum, ReferenceID: f.refID, RootDelay: 30 * time.Microsecond, RootDispersion: 20 * time.Microsecond,
		Precision: time.Microsecond, ReferenceTime: t2.Add(-time.Second), Time: t3, Poll: f.poll, KissCode: f.kiss,
		Timestamps: ntp.ProtocolTimestamps{ClientXmit: t1, ServerRecv: t2, ServerXmit: t3, ClientRecv: t4},
	}, nil
}

func tracker(t *testing.T, servers map[string]fake) (*Tracker, *clock.Steady) {
	t.Helper()
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Steady: s, Query: func(addr string, q ntp.QueryOptions) (*ntp.Response, error) { return servers[addr].answer(q) }}
	for a := range servers {
		o.Servers = append(o.Servers, a)
	}
	return New(o), s
}

// run lets a tracker work for d of the bubble's time.
func run(t *testing.T, tr *Tracker, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- tr.Run(ctx) }()
	time.Sleep(d)
	synctest.Wait()
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// wall is UTC - steady as this process has it.
func wall(s *clock.Steady) int64 { return time.Now().UnixNano() - s.Now() }

func good() fake { return fake{stratum: 2, refID: 0x0a000001, delay: 200 * time.Microsecond} }

func TestTheMajorityOutvotesALiar(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		liar := good()
		liar.lie = 50 * time.Millisecond
		tr, s := tracker(t, map[string]fake{"a": good(), "b": good(), "liar": liar})
		for range 5 {
			run(t, tr, 70*time.Second)
			st, ok := tr.Now()
			truth := wall(s)
			if !ok || st.LowerNS > truth || st.UpperNS < truth || st.Agree != 2 || st.Bound > int64(200*time.Millisecond) {
				t.Errorf("state %+v %v, the truth is %d", st, ok, truth)
			}
			for _, sv := range st.Servers {
				if sv.Agrees == (sv.Addr == "liar") {
					t.Errorf("server %+v", sv)
				}
			}
		}
	})
}

// A liar that is off by less than the answers are good cannot be told, but it must not make the bound miss.
func TestALiarThatMeetsTheOthersDoesNotMakeTheBoundMiss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		liar := good()
		liar.lie = 300 * time.Microsecond
		tr, s := tracker(t, map[string]fake{"a": good(), "b": good(), "liar": liar})
		run(t, tr, 70*time.Second)
		st, ok := tr.Now()
		if truth := wall(s); !ok || st.LowerNS > truth || st.UpperNS < truth || st.OffsetNS < st.LowerNS || st.OffsetNS > st.UpperNS {
			t.Errorf("state %+v %v, the truth is %d", st, ok, truth)
		}
	})
}

func TestWithoutAMajorityThereIsNoUTC(t *testing.T) {
	lie := func(d time.Duration) fake { f := good(); f.lie = d; return f }
	for name, servers := range map[string]map[string]fake{
		"no server":                      {},
		"nobody answers":                 {"a": {err: errors.New("timeout")}, "b": {err: errors.New("timeout")}},
		"one of three answers":           {"a": good(), "b": {err: errors.New("timeout")}, "c": {err: errors.New("timeout")}},
		"three that contradict":          {"a": good(), "b": lie(time.Second), "c": lie(-time.Second)},
		"two that contradict":            {"a": good(), "b": lie(time.Second)},
		"a computer's own clock":         {"a": {stratum: 3, refID: 127<<24 | 127<<16 | 1<<8}},
		"a server that says: go away":    {"a": {stratum: 0, kiss: "DENY"}},
		"a server that is not in sync":   {"a": {stratum: 16}},
		"a server from the distant past": {"a": {stratum: 1, lie: -1000 * time.Hour}, "b": {err: errors.New("x")}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tr, _ := tracker(t, servers)
				run(t, tr, 10*time.Second)
				if st, ok := tr.Now(); ok {
					t.Errorf("UTC %+v", st)
				} else if len(st.Servers) != len(servers) {
					t.Errorf("%d servers stated", len(st.Servers))
				}
			})
		})
	}
}

func TestServersAreLeftAloneAsTheyAsk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow, kiss := good(), fake{stratum: 0, kiss: "RATE"}
		slow.poll = 512 * time.Second
		tr, _ := tracker(t, map[string]fake{"slow": slow, "kiss": kiss, "usual": good()})
		run(t, tr, 1000*time.Second)
		st, _ := tr.Now()
		limits := map[string]int64{"slow": startCount + 2, "kiss": 2, "usual": startCount + 16}
		for _, s := range st.Servers {
			if s.Queries > limits[s.Addr] || s.Queries == 0 {
				t.Errorf("%s was asked %d times in 1000 s, limit %d", s.Addr, s.Queries, limits[s.Addr])
			}
		}
	})
}

func TestVotes(t *testing.T) {
	for _, c := range []struct {
		name       string
		in         []interval
		configured int
		want       election
		ok         bool
	}{
		{"nobody", nil, 3, election{}, false},
		{"one alone", []interval{{1, 5}}, 1, election{interval{1, 5}, 1, interval{1, 5}}, true},
		{"one of two is no majority", []interval{{1, 5}}, 2, election{interval{1, 5}, 1, interval{}}, false},
		{"two that touch", []interval{{1, 5}, {5, 9}}, 2, election{interval{5, 5}, 2, interval{5, 5}}, true},
		{"a liar apart", []interval{{1, 5}, {3, 9}, {100, 101}}, 3, election{interval{3, 5}, 2, interval{3, 5}}, true},
		{"a liar that meets the others", []interval{{1, 5}, {2, 6}, {4, 9}}, 3, election{interval{4, 5}, 3, interval{2, 6}}, true},
		{"one within another", []interval{{1, 9}, {3, 4}, {2, 8}}, 3, election{interval{3, 4}, 3, interval{2, 8}}, true},
		{"two places that most hold possible", []interval{{1, 9}, {2, 3}, {7, 8}}, 3, election{interval{2, 3}, 2, interval{2, 8}}, true},
	} {
		got, ok := vote(c.in, c.configured)
		if got != c.want || ok != c.ok {
			t.Errorf("%s: %+v %v, want %+v %v", c.name, got, ok, c.want, c.ok)
		}
	}
}

func FuzzVote(f *testing.F) {
	f.Add(uint64(1), uint8(3))
	f.Fuzz(func(t *testing.T, seed uint64, n uint8) {
		r := rand.New(rand.NewPCG(seed, 2))
		var in []interval
		for range n {
			lo := r.Int64N(1000)
			in = append(in, interval{lo, lo + r.Int64N(100)})
		}
		const truth = 500
		for range int(n) + 1 { // of all, more than half are right
			lo := truth - r.Int64N(100)
			in = append(in, interval{lo, truth + r.Int64N(100)})
		}
		got, ok := vote(in, len(in))
		inside := 0
		for _, i := range in {
			if i.contains(got.won) {
				inside++
			}
		}
		if got.won.lo > got.won.up || inside < got.agree || !ok || !got.bound.contains(got.won) || !got.bound.contains(interval{truth, truth}) {
			t.Fatalf("%+v %v, the interval lies in %d of %d, the truth is %d", got, ok, inside, len(in), truth)
		}
	})
}
