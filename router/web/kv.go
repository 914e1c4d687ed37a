package web

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// KV asks the nodes what they keep of KV (GET /kv_stats), as long as a page follows and not otherwise: what nobody looks at
// costs nothing. All pages share the answers.
type KV struct {
	nodes  func() map[string]string
	client *http.Client

	mu        sync.Mutex // guards what follows; short reads and writes only
	followers int
	turn      int64 // rises with each round of answers
	answers   map[string]json.RawMessage
}

const (
	kvPause   = 2 * time.Second // between two rounds
	kvTimeout = time.Second     // of a round
	kvAtOnce  = 16              // nodes that are asked at the same time
	maxKV     = 256 << 10       // bytes of an answer
)

// NewKV returns one that asks nodes, URLs by name.
func NewKV(nodes func() map[string]string, client *http.Client) *KV {
	return &KV{nodes: nodes, client: client}
}

// Run asks until ctx ends.
func (k *KV) Run(ctx context.Context) error {
	tick := time.NewTicker(kvPause)
	defer tick.Stop()
	for {
		if k.followed() {
			k.put(k.ask(ctx))
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// follow counts a page until its end.
func (k *KV) follow() (end func()) {
	count := func(n int) {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.followers += n
	}
	count(1)
	return func() { count(-1) }
}

func (k *KV) followed() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.followers > 0
}

func (k *KV) put(answers map[string]json.RawMessage) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.answers = answers // not written any more
	k.turn++
}

// newest is the last round: its number, 0 before the first, and the answers of those that gave one.
func (k *KV) newest() (turn int64, answers map[string]json.RawMessage) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.turn, k.answers
}

func (k *KV) ask(ctx context.Context) map[string]json.RawMessage {
	ctx, cancel := context.WithTimeout(ctx, kvTimeout)
	defer cancel()
	var mu sync.Mutex // guards out
	out := map[string]json.RawMessage{}
	var running sync.WaitGroup
	places := make(chan struct{}, kvAtOnce)
	for name, url := range k.nodes() {
		places <- struct{}{}
		running.Go(func() {
			defer func() { <-places }()
			b, err := k.get(ctx, url)
			if err != nil {
				return // the page shows that it is not known
			}
			mu.Lock()
			defer mu.Unlock()
			out[name] = b
		})
	}
	running.Wait()
	return out
}

func (k *KV) get(ctx context.Context, url string) (json.RawMessage, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+"/kv_stats", http.NoBody)
	if err != nil {
		return nil, err
	}
	res, err := k.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, maxKV))
	switch {
	case err != nil:
		return nil, fmt.Errorf("read KV statistics of %s: %w", url, err)
	case res.StatusCode != http.StatusOK || !json.Valid(b):
		return nil, fmt.Errorf("KV statistics of %s: status %d, %d bytes", url, res.StatusCode, len(b))
	}
	return b, nil
}
