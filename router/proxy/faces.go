package proxy

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"meridian.internal/router/keys"
	"meridian.internal/router/pool"
	"meridian.internal/shared/api"
	"meridian.internal/shared/clock"
)

// Routes adds the router's routes.
func (p *Proxy) Routes(e *echo.Echo) {
	e.POST("/v1/completions", func(c echo.Context) error { return p.serve(c, false) })
	e.POST("/v1/chat/completions", func(c echo.Context) error { return p.serve(c, true) })
	e.GET("/v1/models", p.models)
	e.GET("/v1/models/*", p.model)
	e.GET("/cluster", p.cluster)
	if p.o.Timelines != nil {
		e.GET("/timelines", p.timelines)
		e.GET("/timelines/:id", p.timeline)
	}
}

// models lists the models that the client may use.
func (p *Proxy) models(c echo.Context) error {
	data, e := p.modelsFor(c.Request())
	if e != nil {
		return e
	}
	return c.JSON(http.StatusOK, map[string]any{"object": "list", "data": data})
}

// model tells of one of them.
func (p *Proxy) model(c echo.Context) error {
	data, e := p.modelsFor(c.Request())
	if e != nil {
		return e
	}
	id, err := url.PathUnescape(c.Param("*")) // names of models may have slashes
	for _, m := range data {
		if err == nil && m["id"] == id {
			return c.JSON(http.StatusOK, m)
		}
	}
	return &api.Error{Code: http.StatusNotFound, Type: api.TypeNotFound, Param: "model", Stage: "parse", Message: "no model of this name is served"}
}

func (p *Proxy) modelsFor(r *http.Request) ([]map[string]any, *api.Error) {
	var who *keys.Principal
	if p.o.Keys != nil {
		var e *api.Error
		if who, _, e = identify(p.o.Keys, r, false); e != nil {
			return nil, e
		}
	}
	data := []map[string]any{}
	for _, m := range p.o.Pool.Models() {
		if who != nil && !who.MayUse(m.Name) {
			continue
		}
		one := map[string]any{"id": m.Name, "object": "model", "created": 0, "owned_by": "meridian"}
		if m.ContextLen > 0 {
			one["max_model_len"] = m.ContextLen
		}
		data = append(data, one)
	}
	return data, nil
}

// ClusterNode is one node as /cluster shows it.
type ClusterNode struct {
	Name     string `json:"name"`
	Role     string `json:"role"`
	URL      string `json:"url"`
	State    string `json:"state"`
	Static   bool   `json:"static"`
	Foreign  bool   `json:"foreign"`
	PID      int    `json:"pid,omitempty"`
	Model    string `json:"model,omitempty"`
	Hash     string `json:"model_hash,omitempty"`
	Reserved int    `json:"reserved"` // legs of this router
	// OthersReserved are legs of other routers that the load does not include yet.
	OthersReserved int  `json:"others_reserved"`
	Qualified      bool `json:"qualified"` // a generation has gone through it
	// Why it is not qualified.
	Why       string        `json:"why,omitempty"`
	PrefillNS *int64        `json:"prefill_ns_per_token"` // measured; null: not yet
	Load      *ClusterLoad  `json:"load"`                 // null: none was reported
	Ranks     []ClusterRank `json:"ranks,omitempty"`      // absent: the node has one
	Stages    int           `json:"stages,omitempty"`     // of the pipeline of each rank; absent: it is none
	Clock     *ClusterClock `json:"clock"`
}

// ClusterLoad is what a node told of its load.
type ClusterLoad struct {
	Running       int    `json:"running"`
	Waiting       int    `json:"waiting"`
	WaitingTokens int    `json:"waiting_tokens"`
	KVUsedBlocks  int    `json:"kv_used_blocks"`
	KVMaxBlocks   int    `json:"kv_max_blocks"`
	AgeNS         *int64 `json:"age_ns"`
	Stale         bool   `json:"stale"` // too old to be believed: what is reserved counts alone
}

// ClusterRank is the load of a data-parallel rank, of the same age as the node's.
type ClusterRank struct {
	DPRank        int `json:"dp_rank"`
	Running       int `json:"running"`
	Waiting       int `json:"waiting"`
	WaitingTokens int `json:"waiting_tokens"`
	KVUsedBlocks  int `json:"kv_used_blocks"`
	KVMaxBlocks   int `json:"kv_max_blocks"`
}

// ClusterClock is the estimate of a node's clock: offset = reference - local; null where none is known.
type ClusterClock struct {
	OffsetNS *int64 `json:"offset_ns"`
	BoundNS  *int64 `json:"bound_ns"`
	State    string `json:"state"`
}

// Cluster is what GET /cluster answers.
type Cluster struct {
	Router   string        `json:"router"`
	ClockID  clock.ID      `json:"clock_id"`
	Schedule string        `json:"schedule"`
	Nodes    []ClusterNode `json:"nodes"`
	// Pairs are the ways through the cluster that were probed or measured, at most some hundred; PairsTotal counts all.
	Pairs      []pool.PairStatus `json:"pairs"`
	PairsTotal int               `json:"pairs_total"`
}

// Cluster says which nodes are known, with their load and clocks.
func (p *Proxy) Cluster() Cluster {
	c := Cluster{Router: p.o.Name, ClockID: p.o.Steady.ID(), Schedule: p.o.Schedule, Nodes: []ClusterNode{}}
	for _, st := range p.o.Pool.Snapshot() {
		c.Nodes = append(c.Nodes, p.describe(st))
	}
	c.Pairs, c.PairsTotal = p.o.Pool.Pairs()
	return c
}

func (p *Proxy) cluster(c echo.Context) error {
	c.Response().Header().Set("Cache-Control", "no-store")
	return c.JSON(http.StatusOK, p.Cluster())
}

func (p *Proxy) describe(st pool.Status) ClusterNode {
	n := ClusterNode{
		Name: st.Info.Name, Role: string(st.Info.Role), URL: st.Info.URL, State: string(st.Info.State), Static: st.Static,
		Foreign: st.Foreign, PID: st.Info.PID, Reserved: st.Reserved, Clock: &ClusterClock{State: "not_aligned"},
		OthersReserved: st.OthersReserved, Qualified: st.Qualified, Why: st.Why, PrefillNS: st.PrefillNS, Stages: st.Info.Stages,
	}
	if !st.Healthy {
		n.State = "unhealthy"
	}
	if m := st.Info.Model; m != nil {
		n.Model, n.Hash = m.Name, m.Hash
	}
	if l := st.Info.Load; l != nil {
		n.Load = &ClusterLoad{
			Running: l.Running, Waiting: l.Waiting, WaitingTokens: l.WaitingTokens,
			KVUsedBlocks: l.KVUsedBlocks, KVMaxBlocks: l.KVMaxBlocks, AgeNS: st.LoadAgeNS, Stale: st.LoadStale,
		}
	}
	for rank, l := range st.Info.Ranks {
		n.Ranks = append(n.Ranks, ClusterRank{rank, l.Running, l.Waiting, l.WaitingTokens, l.KVUsedBlocks, l.KVMaxBlocks})
	}
	e, ok := p.o.Estimate(st.Info)
	if !ok {
		return n
	}
	n.Clock.State = e.State
	if e.Usable() {
		offset, bound := e.OffsetNS, e.BoundNS()
		n.Clock.OffsetNS, n.Clock.BoundNS = &offset, &bound
	}
	return n
}

const (
	defaultTimelines = 50
	maxTimelines     = 1000
)

func (p *Proxy) timelines(c echo.Context) error {
	limit := defaultTimelines
	if v := c.QueryParam("limit"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil || n < 1 || n > maxTimelines {
			return api.Invalid("limit", "limit=%q: want a number from 1 to %d", v, maxTimelines)
		}
		limit = n
	}
	lines := p.o.Timelines.Recent(limit)
	out := []byte(`{"timelines":[`)
	for i, l := range lines {
		if i > 0 {
			out = append(out, ',')
		}
		out = append(out, l...)
	}
	c.Response().Header().Set("Cache-Control", "no-store")
	return c.JSONBlob(http.StatusOK, append(out, "]}"...))
}

// lineWait bounds how long who asks for a timeline waits while it is being made: longer than records are waited for.
const lineWait = 3 * time.Second

func (p *Proxy) timeline(c echo.Context) error {
	id, err := url.PathUnescape(c.Param("id")) // an id has no % of its own
	if err != nil {
		return noTimeline
	}
	ctx, cancel := context.WithTimeout(c.Request().Context(), lineWait)
	defer cancel()
	line, ok := p.o.Timelines.Await(ctx, id)
	if !ok {
		return noTimeline
	}
	return c.JSONBlob(http.StatusOK, line)
}

var noTimeline = &api.Error{Code: http.StatusNotFound, Type: api.TypeNotFound, Param: "id", Stage: "timeline", Message: "no timeline with this id is known"}
