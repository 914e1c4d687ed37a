package pool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"syscall"
	"time"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/node"
)

const (
	lookEvery    = 100 * time.Millisecond
	checkEvery   = 400 * time.Millisecond
	checkTimeout = 600 * time.Millisecond
	// maxFailures checks in a row make a node gone: with the times above a static node whose host vanished is noticed
	// within 2 s, and one whose lease ended before within 3.
	maxFailures   = 2
	maxCheckBytes = 64 << 10
)

func (p *Pool) addStatic(s Static) error {
	u, err := url.Parse(s.URL)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" || u.User != nil {
		return fmt.Errorf("static %s node %q: want a URL like http://host:port, and nothing behind it", s.Role, s.URL)
	}
	if !serves(s.Role) {
		return fmt.Errorf("static node %q: role %q serves no requests", s.URL, s.Role)
	}
	base := strings.TrimRight(s.URL, "/")
	m := p.newMember(node.Info{Name: u.Host, Role: s.Role, URL: base, State: node.Starting})
	m.static, m.foreign = true, true
	m.proven = p.presumed(m)
	p.members[key(s.Role, u.Host)] = m
	p.rebuild()
	return nil
}

// Run checks health until ctx ends: of static nodes always, of registered ones while the bus is down or after their lease
// ended without a word.
func (p *Pool) Run(ctx context.Context) error {
	var checks sync.WaitGroup
	defer checks.Wait()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		p.tidy()
		for _, m := range p.due() {
			checks.Go(func() { p.check(ctx, m) })
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// tidy ends what has lasted too long: loads, claims, and the word of other routers.
func (p *Pool) tidy() {
	now := p.o.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.age(now)
	p.expire(now)
	p.forgetPeers(now)
}

// due marks and returns the members whose health is to be checked now.
func (p *Pool) due() []*member {
	now := p.o.Now()
	busUp := p.o.BusUp != nil && p.o.BusUp()
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []*member
	for _, m := range p.members {
		if m.checking || (!m.static && busUp && !m.lapsed) {
			continue
		}
		// A failed check is repeated at once.
		if m.checkedNS == 0 || m.failures == 1 || now-m.checkedNS >= int64(checkEvery) {
			m.checking = true
			out = append(out, m)
		}
	}
	return out
}

// check asks one node for its health and takes the answer in. A static node tells who it is when it comes up.
func (p *Pool) check(ctx context.Context, m *member) {
	p.mu.Lock()
	info, known := m.info, m.info.State == node.Ready && m.healthy
	p.mu.Unlock()
	_, err := p.get(ctx, info.URL+"/health")
	if err == nil && m.static {
		err = p.refresh(ctx, m, info, known)
	}
	p.checked(m, err)
}

// refresh learns who a static node is when it comes up, and the load of one that is ours.
func (p *Pool) refresh(ctx context.Context, m *member, info node.Info, known bool) error {
	p.mu.Lock()
	foreign := m.foreign
	p.mu.Unlock()
	if known && foreign {
		return nil
	}
	fresh, foreign, err := p.identify(ctx, info)
	if err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	regroup := m.info.Name != fresh.Name || m.foreign != foreign || !sameModel(m.info.Model, fresh.Model)
	if m.info.ClockID != fresh.ClockID && m.info.ClockID != "" {
		p.unprove(m) // another process answers at the address
	}
	if m.foreign != foreign {
		m.foreign = foreign
		p.unprove(m)
	}
	m.info = fresh
	if regroup {
		p.rebuild()
	}
	if fresh.Load != nil {
		m.reported(*fresh.Load, fresh.Ranks, p.o.Now())
		p.changed()
	}
	m.sync()
	return nil
}

func (p *Pool) checked(m *member, err error) {
	now := p.o.Now()
	var gone []*Lease
	p.mu.Lock()
	if m.lapsed && err != nil && (m.failures+1 >= maxFailures || errors.Is(err, syscall.ECONNREFUSED)) {
		tellAll := p.drop(m, "its lease ended and its health check failed: "+err.Error())
		p.mu.Unlock()
		tellAll()
		return
	}
	m.checking = false
	m.checkedNS = now
	switch {
	case err == nil:
		if !m.healthy {
			p.o.Logger.Info("node is healthy", "role", m.info.Role, "node", m.info.Name)
		}
		m.healthy, m.failures, m.suspectNS, m.sick = true, 0, 0, ""
		m.sync()
	default:
		m.failures++
		m.sick = err.Error()
		if m.failures == maxFailures { // said once, also of one that never was well
			p.o.Logger.Warn("node is not healthy", "role", m.info.Role, "node", m.info.Name, "error", err)
		}
		if m.failures >= maxFailures && m.healthy {
			m.healthy = false
			p.unprove(m)
			gone = m.take()
		}
	}
	name, role := m.info.Name, m.info.Role
	p.mu.Unlock()
	tell(gone, fmt.Errorf("%w: %s %s failed its health checks: %w", ErrGone, role, name, err))
}

// get fetches a small body; a status of 300 and above is an error, since redirects are not followed.
func (p *Pool) get(ctx context.Context, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return nil, err
	}
	res, err := p.o.Client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxCheckBytes))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", url, err)
	}
	if res.StatusCode >= http.StatusMultipleChoices {
		return nil, &statusError{url, res.StatusCode}
	}
	return body, nil
}

// statusError is returned when a node answers with a status of 300 and above.
type statusError struct {
	url    string
	status int
}

// Error is error's.
func (e *statusError) Error() string { return fmt.Sprintf("GET %s: status %d", e.url, e.status) }

// serverInfo is what /server_info of our nodes says. TensorRT-LLM's has neither role nor model.
type serverInfo struct {
	Name    string      `json:"name"`
	Role    node.Role   `json:"role"`
	Model   *node.Model `json:"model"`
	Load    *infer.Load `json:"load"`
	ClockID clock.ID    `json:"clock_id"`
	Disagg  struct {
		Endpoints []string `json:"ctx_info_endpoint"`
	} `json:"disaggregated_params"`
}

// identify learns who a static node is. A worker that does not say so, or cannot show it, is foreign; its model is the first of /v1/models. One
// that does not answer has said neither: a node of ours must not become foreign because it was slow once.
func (p *Pool) identify(ctx context.Context, info node.Info) (node.Info, bool, error) {
	body, err := p.get(ctx, info.URL+"/server_info")
	if refused := (*statusError)(nil); err != nil && !errors.As(err, &refused) {
		return info, true, fmt.Errorf("identify %s: %w", info.URL, err)
	}
	if err == nil {
		var si serverInfo
		if json.Unmarshal(body, &si) == nil && si.Role != "" && si.Model != nil && si.Model.Hash != "" && (p.o.Ours == nil || p.o.Ours(info.URL)) {
			info.Model, info.Load, info.ClockID, info.State = si.Model, si.Load, si.ClockID, node.Ready
			if si.Name != "" {
				info.Name = si.Name // its records bear this name
			}
			if len(si.Disagg.Endpoints) > 0 {
				info.KVAddr = strings.TrimPrefix(si.Disagg.Endpoints[0], "tcp://")
			}
			return info, false, nil
		}
	}
	body, err = p.get(ctx, info.URL+"/v1/models")
	if err != nil {
		return info, true, fmt.Errorf("identify %s: %w", info.URL, err)
	}
	var models struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if err := json.Unmarshal(body, &models); err != nil || len(models.Data) == 0 {
		return info, true, fmt.Errorf("identify %s: /v1/models names no model", info.URL)
	}
	info.Model = &node.Model{Name: models.Data[0].ID}
	info.State = node.Ready
	return info, true, nil
}
