// Package probe owns the asking side of clock exchanges: it sends bursts to one peer, over UDP with kernel stamps, plain
// UDP or HTTP, whatever works, and returns the exchanges. It estimates nothing and keeps no history.
//
// A Prober belongs to one goroutine.
package probe

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/shared/clock"
)

// Transport says how the exchanges of a burst travelled.
type Transport = string

// The transports, best first.
const (
	UDPKernel Transport = "udp-kernel"
	UDP       Transport = "udp"
	HTTP      Transport = "http"
)

// The errors of Burst.
var (
	ErrNoReply  = errors.New("probe: no usable reply")        // is returned when nothing came back in time
	ErrNoWay    = errors.New("probe: no address to probe")    // is returned when a peer has neither address
	ErrTwoClock = errors.New("probe: two clocks in a burst")  // is returned when the peer's clock id changed meanwhile
	ErrForeign  = errors.New("probe: no clock reply of ours") // is returned when an answer is malformed
)

// Burst is what one burst proved.
type Burst struct {
	Exchanges []ntp.Exchange // of which a good part is exact; order does not matter
	Peer      clock.ID       // "" when the peer does not say (a foreign worker)
	Transport Transport
	RTTNS     int64 // least round trip
	Lost      int
	Local     *ntp.Pair // of our clock; nil: not known
	Remote    *ntp.Pair // of the peer's
}

// Options of a prober.
type Options struct {
	ClockAddr  string        // host:port of the peer's UDP responder; "": HTTP only
	URL        string        // base URL of the peer; "": UDP only
	Key        []byte        // HMAC key of UDP packets
	NoKernelTS bool          // plain UDP
	Timeout    time.Duration // of one exchange; 0: 200 ms
	// Batch makes the bursts of a peer that is stamped by the kernel together with those of others; nil: a socket per peer.
	Batch *Batch
	// Transport shows the cluster's credentials over HTTP; nil: there are none.
	Transport func(*http.Transport) http.RoundTripper
}

const (
	defaultTimeout = 200 * time.Millisecond
	// After udpTries bursts without a UDP reply HTTP is used, and UDP is tried again after 1, 2, 4, at last after udpAgain bursts: a
	// process that was stopped for a while answers over HTTP first, since that waits longer.
	udpTries = 2
	udpAgain = 30
)

// Prober probes one peer.
type Prober struct {
	steady *clock.Steady
	opts   Options
	udp    *udpProber
	web    *webProber
	failed int // UDP bursts in a row without a reply
	pause  int // bursts over HTTP until UDP is tried again
	rest   int // of these are left
}

// New returns a prober; it opens nothing yet.
func New(s *clock.Steady, o Options) (*Prober, error) {
	if o.ClockAddr == "" && o.URL == "" {
		return nil, ErrNoWay
	}
	if o.Timeout <= 0 {
		o.Timeout = defaultTimeout
	}
	p := &Prober{steady: s, opts: o}
	if o.ClockAddr != "" {
		p.udp = &udpProber{steady: s, opts: o}
	}
	if o.URL != "" {
		p.web = newWebProber(s, o)
	}
	return p, nil
}

// Close ends the connections.
func (p *Prober) Close() {
	if p.udp != nil {
		p.udp.close()
	}
	if p.web != nil {
		p.web.close()
	}
}

// Burst makes n exchanges back to back. With an error, nothing was proven.
func (p *Prober) Burst(ctx context.Context, n int) (Burst, error) {
	if p.udp != nil && (p.rest == 0 || p.web == nil) {
		b, err := p.udp.burst(ctx, n)
		if err == nil {
			p.failed, p.pause = 0, 0
			return b, nil
		}
		p.failed++
		if p.web == nil || p.failed < udpTries || ctx.Err() != nil {
			return Burst{}, err
		}
		p.pause = min(max(1, 2*p.pause), udpAgain)
		p.rest = p.pause
	}
	if p.rest > 0 {
		p.rest--
	}
	if p.web == nil {
		return Burst{}, fmt.Errorf("%w: %s", ErrNoReply, p.opts.ClockAddr)
	}
	b, err := p.web.burst(ctx, n)
	if err != nil {
		p.pause, p.rest = 0, 0 // the peer is away, which says nothing against UDP
	}
	return b, err
}

// finish checks a burst and fills in what follows from its exchanges.
func (b Burst) finish() (Burst, error) {
	if len(b.Exchanges) == 0 {
		return Burst{}, ErrNoReply
	}
	b.RTTNS = b.Exchanges[0].Delay()
	for _, e := range b.Exchanges {
		b.RTTNS = min(b.RTTNS, e.Delay())
	}
	return b, nil
}

func localPair(s *clock.Steady) *ntp.Pair {
	m, raw, h := s.Raw()
	if h > 1<<40 {
		return nil
	}
	return &ntp.Pair{AtNS: m, DiffNS: raw - m, ErrNS: h}
}
