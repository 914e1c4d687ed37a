package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/clocksync/respond"
	"meridian.internal/shared/clock"
)

func steady(t testing.TB, o clock.Options) *clock.Steady {
	t.Helper()
	s, err := clock.New(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// serve runs a responder for the length of the test.
func serve(t testing.TB, s *clock.Steady, o respond.Options) *respond.Responder {
	t.Helper()
	r, err := respond.Listen("127.0.0.1:0", s, o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return r
}

// patience is how long an answer that comes is waited for.
const patience = time.Minute

// impatient has a prober wait shortly for answers over UDP, which do not come.
func impatient(p *Prober) *Prober {
	p.udp.opts.Timeout = 50 * time.Millisecond
	return p
}

func prober(t testing.TB, s *clock.Steady, o Options) *Prober {
	t.Helper()
	o.Timeout = patience
	p, err := New(s, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// check says whether every exchange is possible and covers the truth: both sides read one clock, the peer's is behind by
// offset.
func check(t *testing.T, b Burst, offset int64) {
	t.Helper()
	for _, e := range b.Exchanges {
		if !e.Possible(0) || e.Lower() > offset || e.Upper() < offset {
			t.Errorf("exchange %+v proves [%d, %d], the truth is %d", e, e.Lower(), e.Upper(), offset)
		}
	}
}

func TestBurstsCoverTheTruthOnEveryTransport(t *testing.T) {
	server, client := steady(t, clock.Options{}), steady(t, clock.Options{})
	slack := server.AnchorErrNS() + client.AnchorErrNS()
	web := httptest.NewServer(clock.OffsetHandler(server, clock.NewAdjusted(server)))
	t.Cleanup(web.Close)
	r := serve(t, server, respond.Options{Key: []byte("k")})
	for _, c := range []struct {
		name string
		opts Options
		want []Transport
	}{
		{"UDP with kernel stamps", Options{ClockAddr: r.Advertised("127.0.0.1"), Key: []byte("k")}, []Transport{UDPKernel, UDP}},
		{"plain UDP", Options{ClockAddr: r.Advertised("127.0.0.1"), Key: []byte("k"), NoKernelTS: true}, []Transport{UDP}},
		{"HTTP", Options{URL: web.URL}, []Transport{HTTP}},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := prober(t, client, c.opts)
			for range 5 {
				b, err := p.Burst(t.Context(), 8)
				if err != nil {
					t.Fatal(err)
				}
				if b.Transport != c.want[0] && b.Transport != c.want[len(c.want)-1] {
					t.Errorf("transport %s, want %v", b.Transport, c.want)
				}
				if b.Peer != server.ID() || b.Remote == nil || b.Local == nil || len(b.Exchanges) < 8 && !slept(b) {
					t.Errorf("burst %+v", b)
				}
				for i := range b.Exchanges {
					b.Exchanges[i].ErrNS += slack // two anchors of one kernel
				}
				check(t, b, 0)
			}
		})
	}
	if c := r.Counters(); c.Replies == 0 || c.Errors != 0 {
		t.Errorf("counters %+v", c)
	}
}

// slept says whether a burst over HTTP was cut short since the server took long for an answer, as one that had no processor does.
func slept(b Burst) bool {
	last := b.Exchanges[len(b.Exchanges)-1]
	return b.Transport == HTTP && last.T3-last.T2 > int64(50*time.Millisecond)
}

func TestALiarIsBelievedByTheProbe(t *testing.T) {
	server, client := steady(t, clock.Options{FaultLie: time.Millisecond}), steady(t, clock.Options{})
	r := serve(t, server, respond.Options{})
	p := prober(t, client, Options{ClockAddr: r.Advertised("127.0.0.1")})
	b, err := p.Burst(t.Context(), 8)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b.Exchanges {
		b.Exchanges[i].ErrNS += server.AnchorErrNS() + client.AnchorErrNS()
	}
	check(t, b, -1_000_000)
}

func TestWithoutAnAnswerOverUDPTheProberGoesOnOverHTTP(t *testing.T) {
	server := steady(t, clock.Options{})
	web := httptest.NewServer(clock.OffsetHandler(server, clock.NewAdjusted(server)))
	t.Cleanup(web.Close)
	p := impatient(prober(t, steady(t, clock.Options{}), Options{ClockAddr: "127.0.0.1:1", URL: web.URL}))
	for range udpTries - 1 {
		if _, err := p.Burst(t.Context(), 1); !errors.Is(err, ErrNoReply) {
			t.Fatalf("first burst: %v", err)
		}
	}
	b, err := p.Burst(t.Context(), 3)
	if err != nil || b.Transport != HTTP || len(b.Exchanges) != 3 {
		t.Fatalf("second burst: %+v %v", b, err)
	}
}

// A peer that was away is asked over UDP as soon as it is back: that it did not answer over HTTP either says nothing against UDP.
func TestAPeerThatWasAwayIsAskedOverUDPAgain(t *testing.T) {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var back atomic.Bool
	done := make(chan struct{})
	t.Cleanup(func() { c.Close(); <-done })
	go func() {
		defer close(done)
		var b [ntp.Size + 1]byte
		for {
			n, from, err := c.ReadFromUDPAddrPort(b[:])
			if err != nil {
				return
			}
			if q, err := ntp.ParsePacket(b[:n], nil); err == nil && back.Load() {
				_, _ = c.WriteToUDPAddrPort(ntp.Packet{Reply: true, Seq: q.Seq, Epoch: 7, T2: 5, T3: 6}.Append(nil, nil), from)
			}
		}
	}()
	p := impatient(prober(t, steady(t, clock.Options{}), Options{ClockAddr: c.LocalAddr().String(), URL: "http://127.0.0.1:1"}))
	for range udpTries + 3 {
		if b, err := p.Burst(t.Context(), 1); err == nil {
			t.Fatalf("nobody answered: %+v", b)
		}
	}
	back.Store(true)
	p.udp.opts.Timeout = patience
	if b, err := p.Burst(t.Context(), 1); err != nil || b.Transport == HTTP {
		t.Errorf("back again: %+v %v", b, err)
	}
}

// A process that was stopped for a while answers over HTTP first. UDP is tried again soon, and ever more seldom if it stays dead.
func TestUDPIsTriedAgainSoonAfterAPause(t *testing.T) {
	server := steady(t, clock.Options{})
	web := httptest.NewServer(clock.OffsetHandler(server, clock.NewAdjusted(server)))
	t.Cleanup(web.Close)
	p := impatient(prober(t, steady(t, clock.Options{}), Options{ClockAddr: "127.0.0.1:1", URL: web.URL}))
	tried, before := []int{}, 0
	for i := range 200 {
		_, _ = p.Burst(t.Context(), 1)
		if p.failed != before {
			tried, before = append(tried, i), p.failed
		}
	}
	if want := []int{0, 1, 2, 4, 8, 16, 32, 62, 92, 122, 152, 182}; !slices.Equal(tried, want) {
		t.Errorf("UDP was tried in bursts %v, want %v", tried, want)
	}
}

func TestAWrongKeyAndStrangersGetNoAnswer(t *testing.T) {
	r := serve(t, steady(t, clock.Options{}), respond.Options{Key: []byte("right")})
	p := impatient(prober(t, steady(t, clock.Options{}), Options{ClockAddr: r.Advertised("127.0.0.1"), Key: []byte("wrong")}))
	if _, err := p.Burst(t.Context(), 2); !errors.Is(err, ErrNoReply) {
		t.Errorf("error %v, want %v", err, ErrNoReply)
	}
	for end := time.Now().Add(patience); r.Counters().Foreign == 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond) // the responder may come to it after the prober has given up
	}
	if c := r.Counters(); c.Foreign == 0 || c.Replies != 0 {
		t.Errorf("counters %+v", c)
	}
}

func TestForgedAndLateRepliesAreIgnored(t *testing.T) {
	conn, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() { conn.Close(); <-done })
	go func() {
		defer close(done)
		var b [128]byte
		for {
			n, from, err := conn.ReadFromUDPAddrPort(b[:])
			if err != nil {
				return
			}
			q, err := ntp.ParsePacket(b[:n], nil)
			if err != nil {
				continue
			}
			answer := func(p ntp.Packet) { _, _ = conn.WriteToUDPAddrPort(p.Append(nil, nil), from) }
			_, _ = conn.WriteToUDPAddrPort([]byte("noise"), from)
			answer(q)                                                           // the request itself
			answer(ntp.Packet{Reply: true, Seq: q.Seq + 1, T2: 1, T3: 1})       // another exchange
			answer(ntp.Packet{Reply: true, Seq: q.Seq, Epoch: 7, T2: 5, T3: 6}) // the answer
			answer(ntp.Packet{Reply: true, Seq: q.Seq, Epoch: 7, T2: 8, T3: 9}) // a replay
		}
	}()
	p := prober(t, steady(t, clock.Options{}), Options{ClockAddr: conn.LocalAddr().String(), NoKernelTS: true})
	b, err := p.Burst(t.Context(), 3)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range b.Exchanges {
		if e.T2 != 5 || e.T3 != 6 {
			t.Errorf("took %+v", e)
		}
	}
}

func TestAForeignWorkerIsProbedByItsSecondsAlone(t *testing.T) {
	server, client := steady(t, clock.Options{}), steady(t, clock.Options{})
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t2 := server.Now()
		_, _ = fmt.Fprintf(w, `{"receive_ts": %s, "transmit_ts": %s}`, clock.AppendSeconds(nil, t2), clock.AppendSeconds(nil, server.Now()))
	}))
	t.Cleanup(web.Close)
	b, err := prober(t, client, Options{URL: web.URL}).Burst(t.Context(), 4)
	if err != nil || b.Peer != "" || b.Remote != nil {
		t.Fatalf("%+v %v", b, err)
	}
	for i := range b.Exchanges {
		b.Exchanges[i].ErrNS += server.AnchorErrNS() + client.AnchorErrNS()
	}
	check(t, b, 0)
}

func TestAnswersThatAreNoneAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		status int
		body   string
	}{
		"a page":             {200, "<html>"},
		"no stamps":          {200, "{}"},
		"not a number":       {200, `{"receive_ts": NaN, "transmit_ts": 1}`},
		"an absurd stamp":    {200, `{"receive_ts": 1e300, "transmit_ts": 1}`},
		"a malformed id":     {200, `{"receive_ts": 1, "transmit_ts": 1, "clock_id": "me"}`},
		"a missing endpoint": {404, `{"receive_ts": 1, "transmit_ts": 1}`},
	} {
		t.Run(name, func(t *testing.T) {
			web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(c.status)
				_, _ = w.Write([]byte(c.body))
			}))
			defer web.Close()
			_, err := prober(t, steady(t, clock.Options{}), Options{URL: web.URL}).Burst(t.Context(), 2)
			if !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), web.URL) {
				t.Errorf("error %v, want ErrForeign that names %s", err, web.URL)
			}
		})
	}
}

func TestAPeerWithoutAnyAddressIsRefused(t *testing.T) {
	if _, err := New(steady(t, clock.Options{}), Options{}); !errors.Is(err, ErrNoWay) {
		t.Errorf("error %v", err)
	}
}

func TestACancelledBurstEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	p := prober(t, steady(t, clock.Options{}), Options{ClockAddr: "127.0.0.1:1"})
	if _, err := p.Burst(ctx, 4); err == nil {
		t.Error("a burst under a cancelled context succeeded")
	}
}

func FuzzParseReading(f *testing.F) {
	f.Add([]byte(`{"receive_ts": 1002545.949123456, "transmit_ts": 1002546.149123456}`))
	f.Add([]byte(`{"clock_id":"0123456789abcdef.01234567","mono_ns":1,"raw_ns":2,"pair_err_ns":3,"receive_ns":4,"receive_ts":0.000000004,"transmit_ns":5,"transmit_ts":0.000000005}`))
	f.Add([]byte(`{"receive_ts": "x"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		_, _, _, errNS, err := ParseReading(body)
		if err != nil && !errors.Is(err, ErrForeign) {
			t.Fatalf("undocumented error %v", err)
		}
		if errNS < 0 {
			t.Fatalf("negative error %d", errNS)
		}
	})
}

func BenchmarkBurst(b *testing.B) {
	server, client := steady(b, clock.Options{}), steady(b, clock.Options{})
	r := serve(b, server, respond.Options{})
	for _, kernel := range []bool{true, false} {
		b.Run(fmt.Sprintf("kernel=%v", kernel), func(b *testing.B) {
			p := prober(b, client, Options{ClockAddr: r.Advertised("127.0.0.1"), NoKernelTS: !kernel})
			var width int64
			n := int64(0)
			for b.Loop() {
				x, err := p.Burst(b.Context(), 4)
				if err != nil {
					b.Fatal(err)
				}
				lo, up := x.Exchanges[0].Lower(), x.Exchanges[0].Upper()
				for _, e := range x.Exchanges {
					lo, up = max(lo, e.Lower()), min(up, e.Upper())
				}
				width += (up - lo) / 2
				n++
			}
			b.ReportMetric(float64(width)/float64(n), "half-ns")
		})
	}
}
