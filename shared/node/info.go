// Package node owns the registration of a process in the cluster: what it says of itself, how it renews its lease in
// NATS, and how others watch the set of processes. It knows nothing of requests.
package node

import (
	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
)

// Role of a process in the registry.
type Role string

// The roles. Routers and clocksync register like nodes, so that their clocks can be probed.
const (
	RoleCtx       Role = "ctx"
	RoleGen       Role = "gen"
	RoleRouter    Role = "router"
	RoleClocksync Role = "clocksync"
)

// State of a process, set by itself.
type State string

// The states.
const (
	Starting State = "starting"
	Ready    State = "ready"
	Draining State = "draining" // finishes what it has, takes nothing new
)

// Info is the registry value of one process (KV bucket MERIDIAN_NODES, key "<role>.<name>"). It is put again every
// 500 ms and on change; an entry not renewed for LeaseTTL is dead.
type Info struct {
	Name      string       `json:"name"`
	Role      Role         `json:"role"`
	URL       string       `json:"url"`                  // http://host:port that others reach it at
	KVAddr    string       `json:"kv_addr,omitempty"`    // host:port of the KV listener (ctx)
	ClockAddr string       `json:"clock_addr,omitempty"` // host:port of the UDP clock responder
	ClockID   clock.ID     `json:"clock_id"`
	PID       int          `json:"pid"`
	State     State        `json:"state"`
	Seq       int64        `json:"seq"`              // rises with each put of this instance
	Model     *Model       `json:"model,omitempty"`  // nodes only
	Load      *infer.Load  `json:"load,omitempty"`   // nodes only
	Ranks     []infer.Load `json:"ranks,omitempty"`  // load of each data-parallel rank; absent: there is one
	Stages    int          `json:"stages,omitempty"` // of the pipeline of each rank; absent: it is none
	Styles    []string     `json:"styles,omitempty"` // serving styles that the node can take part in
	Version   string       `json:"version"`
}

// Model is what a node serves and what a pair must agree on.
type Model struct {
	Name           string `json:"name"`
	Hash           string `json:"hash"`
	ContextLen     int    `json:"context_len"`
	TokensPerBlock int    `json:"tokens_per_block"`
	Numerics       string `json:"numerics"`
	MaxBatchSize   int    `json:"max_batch_size"` // sequences that run at the same time, on all ranks
}
