package service

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"meridian.internal/clocksync/probe"
	"meridian.internal/shared/clock"
)

const (
	// A foreign worker applies a constant: 1 s at 50 ppm leaves ±25 µs. Our own nodes apply the skew too and need to hear
	// only that the line is another, and now and then that it is still good.
	pushForeign = 2 * time.Second
	pushOwn     = 10 * time.Second
	// pushMoved is a shift of the point that no face of a node shows.
	pushMoved   = int64(500)
	pushLimit   = time.Second
	maxPushBusy = 64
)

// pusher posts offsets to nodes: at most one request per node is under way, and of what comes meanwhile only the newest
// is kept. run's goroutine starts the requests.
type pusher struct {
	log    *slog.Logger
	client *http.Client
	poke   chan struct{}

	mu      sync.Mutex // guards what follows; short reads and writes only
	targets map[string]*target

	pushed, refused, failed atomic.Int64
}

// target is a node that is pushed to.
type target struct {
	url     string
	foreign bool
	next    *clock.Estimate
	busy    bool
	last    clock.Estimate
	lastAt  time.Time
	seq     int64
}

func newPusher(log *slog.Logger, show func(*http.Transport) http.RoundTripper) *pusher {
	t := &http.Transport{MaxIdleConnsPerHost: 1, IdleConnTimeout: time.Minute}
	var rt http.RoundTripper = t
	if show != nil {
		rt = show(t)
	}
	return &pusher{
		log: log, poke: make(chan struct{}, 1), targets: map[string]*target{},
		client: &http.Client{Timeout: pushLimit, Transport: rt, CheckRedirect: probe.NoRedirect},
	}
}

// offer takes an estimate of a pair; it is pushed if it leads to the router that leads, and if it says something new.
func (p *pusher) offer(roles map[string]role, e clock.Published, router string) {
	if e.Router != router || !e.Usable() {
		return
	}
	p.mu.Lock()
	for _, r := range roles {
		if r.router || r.name != e.Node || r.url == "" {
			continue
		}
		t := p.targets[r.url]
		if t == nil {
			t = &target{url: r.url}
			p.targets[r.url] = t
		}
		t.foreign = r.foreign
		if t.news(e.Estimate, time.Now()) {
			est := e.Estimate
			t.next = &est
		}
	}
	p.mu.Unlock()
	p.wake()
}

// wake makes run look for what there is to send.
func (p *pusher) wake() {
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

// news says whether e is worth a push: another clock, a point that moved by an eighth of the bound, or some time passed.
func (t *target) news(e clock.Estimate, now time.Time) bool {
	if t.last.Local != e.Local || t.last.Reference != e.Reference || now.Sub(t.lastAt) >= t.every() {
		return true
	}
	d := e.OffsetNS - t.last.OffsetAt(e.AtNS)
	return max(d, -d) > max(e.BoundNS()/8, pushMoved)
}

func (t *target) every() time.Duration {
	if t.foreign {
		return pushForeign
	}
	return pushOwn
}

func (p *pusher) run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	slots := make(chan struct{}, maxPushBusy)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.poke:
		}
		for _, t := range p.ready() {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				p.send(ctx, t)
			})
		}
	}
}

// ready marks the targets that have something to send and are not busy.
func (p *pusher) ready() (out []*target) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.targets {
		if t.next != nil && !t.busy {
			t.busy = true
			out = append(out, t)
		}
	}
	return out
}

// send posts the newest estimate of t.
func (p *pusher) send(ctx context.Context, t *target) {
	p.mu.Lock()
	e, foreign, seq := *t.next, t.foreign, t.seq
	t.next = nil
	p.mu.Unlock()
	// Numbers of pushes rise across restarts and successors of this daemon, which share no memory but the wall clock.
	seq = max(seq+1, time.Now().UnixMilli())
	status, err := p.post(ctx, t.url, PushOf(e, foreign, seq))
	if status == http.StatusConflict && !foreign {
		// Somebody counts ahead of us, perhaps with a wall clock that is ahead.
		if s, gerr := p.appliedSeq(ctx, t.url); gerr == nil && s >= seq {
			seq = s + 1
			status, err = p.post(ctx, t.url, PushOf(e, foreign, seq))
		}
	}
	switch {
	case err == nil:
		p.pushed.Add(1)
	case status != 0:
		p.refused.Add(1)
		p.log.Warn("node refused an offset", "url", t.url, "status", status, "err", err)
	default:
		p.failed.Add(1)
		p.log.Debug("offset not pushed", "url", t.url, "err", err)
	}
	p.mu.Lock()
	t.busy, t.seq, t.lastAt = false, seq, time.Now()
	if err == nil {
		t.last = e
	}
	p.mu.Unlock()
	p.wake() // what came meanwhile
}

// PushOf is the body of a push: for our own nodes exact and complete, for a foreign worker the seconds alone, aimed at the
// middle of the time until the next push, since it applies no skew.
func PushOf(e clock.Estimate, foreign bool, seq int64) clock.Push {
	if foreign {
		s := float64(e.OffsetAt(e.AtNS+int64(pushForeign)/2)) * 1e-9
		return clock.Push{Offset: &s}
	}
	s, bound := float64(e.OffsetNS)*1e-9, e.BoundNS()
	return clock.Push{
		Offset: &s, OffsetNS: &e.OffsetNS, AtNS: e.AtNS, SkewPPB: e.SkewPPB, BoundNS: &bound, VoidAfterNS: e.VoidAfterNS,
		Epoch: e.Local.Epoch(), Seq: seq, Reference: e.Reference,
	}
}

// post returns the status, 0 when there was no answer.
func (p *pusher) post(ctx context.Context, url string, body clock.Push) (int, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return 0, fmt.Errorf("encode push to %s: %w", url, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimRight(url, "/")+clock.OffsetPath, bytes.NewReader(b))
	if err != nil {
		return 0, fmt.Errorf("build push to %s: %w", url, err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, fmt.Errorf("push offset: %w", err)
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
	if resp.StatusCode/100 != 2 {
		return resp.StatusCode, fmt.Errorf("push offset to %s: %s: %s", url, resp.Status, text)
	}
	return resp.StatusCode, nil
}

func (p *pusher) appliedSeq(ctx context.Context, url string) (int64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimRight(url, "/")+clock.OffsetPath, nil)
	if err != nil {
		return 0, fmt.Errorf("build question to %s: %w", url, err)
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, fmt.Errorf("ask for the applied offset: %w", err)
	}
	defer resp.Body.Close()
	var r clock.Reading
	if err := json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(&r); err != nil {
		return 0, fmt.Errorf("read the applied offset of %s: %w", url, err)
	}
	if r.Pushed == nil {
		return 0, fmt.Errorf("%s has no applied offset", url)
	}
	return r.Pushed.Seq, nil
}
