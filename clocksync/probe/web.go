package probe

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"strings"
	"time"

	"meridian.internal/clocksync/ntp"
	"meridian.internal/shared/clock"
)

const (
	maxReading = 64 << 10
	// webTimeout covers TensorRT-LLM's workers, which sleep 0.2 s between their two stamps.
	webTimeout = 2 * time.Second
)

// webProber asks GET /steady_clock_offset over one kept connection of its own: a request that waited behind another, or
// behind a handshake, would only widen the bounds.
type webProber struct {
	steady *clock.Steady
	url    string
	client *http.Client
}

func newWebProber(s *clock.Steady, o Options) *webProber {
	t := &http.Transport{MaxConnsPerHost: 1, MaxIdleConnsPerHost: 1, DisableCompression: true, IdleConnTimeout: time.Minute}
	var rt http.RoundTripper = t
	if o.Transport != nil {
		rt = o.Transport(t)
	}
	return &webProber{
		steady: s, url: strings.TrimRight(o.URL, "/") + clock.OffsetPath,
		client: &http.Client{Transport: rt, Timeout: max(o.Timeout, webTimeout), CheckRedirect: NoRedirect},
	}
}

// NoRedirect is for clients that ask or tell nodes: a node does not choose whom this process calls.
func NoRedirect(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }

func (w *webProber) close() { w.client.CloseIdleConnections() }

func (w *webProber) burst(ctx context.Context, n int) (Burst, error) {
	b := Burst{Transport: HTTP, Local: localPair(w.steady)}
	var lastErr error
	for i := 0; i < n && ctx.Err() == nil; i++ {
		x, r, err := w.exchange(ctx)
		if err != nil {
			b.Lost++
			lastErr = err
			if len(b.Exchanges) == 0 {
				break // one waiting exchange is enough to know
			}
			continue
		}
		if i > 0 && len(b.Exchanges) > 0 && r.ClockID != b.Peer {
			return Burst{}, fmt.Errorf("%w: %q and %q at %s", ErrTwoClock, b.Peer, r.ClockID, w.url)
		}
		b.Peer = r.ClockID
		if r.MonoNS != nil && r.RawNS != nil && r.PairErrNS != nil {
			b.Remote = &ntp.Pair{AtNS: *r.MonoNS, DiffNS: *r.RawNS - *r.MonoNS, ErrNS: *r.PairErrNS}
		}
		b.Exchanges = append(b.Exchanges, x)
		if x.T3-x.T2 > int64(50*time.Millisecond) {
			break // a worker that sleeps while it answers: one exchange a burst
		}
	}
	if len(b.Exchanges) == 0 && lastErr != nil {
		return Burst{}, fmt.Errorf("%w from %s: %w", ErrNoReply, w.url, lastErr)
	}
	b, err := b.finish()
	if err != nil {
		return Burst{}, fmt.Errorf("ask %s: %w", w.url, err)
	}
	return b, nil
}

// exchange stamps T1 when it holds a connection and has written nothing yet (WroteRequest would be late), and T4 at the
// first byte of the answer.
func (w *webProber) exchange(ctx context.Context) (ntp.Exchange, clock.Reading, error) {
	var t1, t4 int64
	trace := &httptrace.ClientTrace{
		GotConn:              func(httptrace.GotConnInfo) { t1 = w.steady.Now() },
		GotFirstResponseByte: func() { t4 = w.steady.Now() },
	}
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, trace), http.MethodGet, w.url, nil)
	if err != nil {
		return ntp.Exchange{}, clock.Reading{}, fmt.Errorf("build request to %s: %w", w.url, err)
	}
	resp, err := w.client.Do(req)
	if err != nil {
		return ntp.Exchange{}, clock.Reading{}, fmt.Errorf("ask for clock: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxReading))
	if err != nil {
		return ntp.Exchange{}, clock.Reading{}, fmt.Errorf("read clock answer of %s: %w", w.url, err)
	}
	if resp.StatusCode != http.StatusOK {
		return ntp.Exchange{}, clock.Reading{}, fmt.Errorf("%w: status %d from %s", ErrForeign, resp.StatusCode, w.url)
	}
	r, t2, t3, errNS, err := ParseReading(body)
	if err != nil {
		return ntp.Exchange{}, clock.Reading{}, fmt.Errorf("clock answer of %s: %w", w.url, err)
	}
	return ntp.Exchange{T1: t1, T2: t2, T3: t3, T4: t4, ErrNS: errNS}, r, nil
}

// ParseReading reads the body of GET /steady_clock_offset, ours or TensorRT-LLM's: seconds alone are rounded to what the
// text and a float64 hold, which errNS states.
func ParseReading(body []byte) (r clock.Reading, t2, t3, errNS int64, err error) {
	if err := json.Unmarshal(body, &r); err != nil {
		return clock.Reading{}, 0, 0, 0, fmt.Errorf("%w: %w", ErrForeign, err)
	}
	if r.ClockID != "" {
		if _, err := clock.ParseID(string(r.ClockID)); err != nil {
			return clock.Reading{}, 0, 0, 0, fmt.Errorf("%w: %w", ErrForeign, err)
		}
	}
	if r.ReceiveNS != nil && r.TransmitNS != nil {
		return r, *r.ReceiveNS, *r.TransmitNS, 0, nil
	}
	t2, err2 := parseSeconds(r.ReceiveTS)
	t3, err3 := parseSeconds(r.TransmitTS)
	if err2 != nil || err3 != nil {
		return clock.Reading{}, 0, 0, 0, fmt.Errorf("%w: receive_ts %q, transmit_ts %q: want seconds", ErrForeign, r.ReceiveTS, r.TransmitTS)
	}
	ulp := math.Nextafter(float64(max(t2, t3))*1e-9, math.Inf(1)) - float64(max(t2, t3))*1e-9
	return r, t2, t3, int64(math.Ceil(ulp*1e9)) + 1, nil
}

func parseSeconds(n json.Number) (int64, error) {
	f, err := strconv.ParseFloat(n.String(), 64)
	if err != nil || math.IsNaN(f) || math.Abs(f) > 9e9 {
		return 0, fmt.Errorf("%w: %q is no number of seconds", ErrForeign, n)
	}
	return int64(math.Round(f * 1e9)), nil
}
