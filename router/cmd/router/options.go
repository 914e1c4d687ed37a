package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"meridian.internal/router/place"
	"meridian.internal/router/pool"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/bytesize"
	"meridian.internal/shared/node"
	"meridian.internal/shared/serve"
)

// options are the command line.
type options struct {
	Name         string        `help:"Name of this router, unique in the cluster: records of the nodes find their way back by it." default:"router"`
	Listen       string        `help:"Address of the public API." default:"127.0.0.1:8000" placeholder:"HOST:PORT"`
	Advertise    string        `help:"Host, or host:port, that others reach this router at. Empty: as it listens, or the host's name if that is every address." placeholder:"HOST[:PORT]"`
	Nats         string        `help:"NATS servers, with commas. Empty and no --embedded-nats: no registry, only --ctx and --gen." name:"nats" placeholder:"URL"`
	EmbeddedNats bool          `help:"Run the NATS server in this process; a cluster of several machines needs one outside." name:"embedded-nats"`
	NatsListen   string        `help:"Address of the embedded NATS server. Open to everybody who reaches it, unless --cluster-token is given." name:"nats-listen" default:"127.0.0.1:4222" placeholder:"HOST:PORT"`
	NatsStore    string        `help:"Folder of the embedded NATS server. Empty: .nats in --traces." name:"nats-store" type:"path" placeholder:"DIR"`
	Traces       string        `help:"Folder for timelines, one line a request." default:"traces" type:"path" placeholder:"DIR"`
	TracesMax    bytesize.Size `help:"Size of all timelines in --traces; over it the oldest files are removed. 0: no limit." name:"traces-max" default:"0" placeholder:"SIZE"`
	Ctx          []string      `help:"Context worker that is in no registry; may be given several times." sep:"," placeholder:"URL"`
	Gen          []string      `help:"Generation worker that is in no registry; may be given several times." sep:"," placeholder:"URL"`
	Schedule     string        `help:"Order of the legs: auto, generation_first, context_first, aggregated. auto is generation_first between our own nodes, context_first with foreign workers, and aggregated where no pair is." enum:"auto,generation_first,context_first,aggregated" default:"auto"`
	Policy       string        `help:"Which node gets a request: round_robin, least_loaded, power_of_two, kv_aware or conversation." enum:"round_robin,least_loaded,power_of_two,kv_aware,conversation" default:"least_loaded"`
	CtxPolicy    string        `help:"--policy of context nodes. Empty: --policy." name:"ctx-policy" enum:",round_robin,least_loaded,power_of_two,kv_aware,conversation" default:""`
	GenPolicy    string        `help:"--policy of generation nodes. Empty: --policy." name:"gen-policy" enum:",round_robin,least_loaded,power_of_two,kv_aware,conversation" default:""`
	LocalPrefill int           `help:"Most uncached prompt tokens that a generation node prefills itself where that is estimated to be faster than a context node and the hand-over. With --schedule auto and kv_aware for generation nodes; 0: never." name:"local-prefill-max" default:"512" placeholder:"TOKENS"`
	Qualify      string        `help:"Which workers must let a generation of two tokens through before they get work: all, own (workers of --ctx and --gen that are not ours are trusted: no probe costs their owner anything) or none." enum:"all,own,none" default:"all"`
	Hedge        float64       `help:"Quantile of the times of prefills, like 0.95: one that takes longer gets a second beside it on another context node, and the first to end serves. One request in twenty at most. 0: never." name:"hedge-quantile" default:"0" placeholder:"QUANTILE"`
	Grace        time.Duration `help:"Time that running requests get after SIGTERM." default:"10s"`
	Timeout      time.Duration `help:"Longest life of a request; then it is ended with an error." default:"10m"`
	ClientIdle   time.Duration `help:"A client that takes no byte for so long is cut." default:"30s"`
	MaxRunning   int           `help:"Sub-requests (prompts x n) that run at a time; further ones wait. 0: twice the sequences that the generation nodes have slots for." name:"max-running" default:"0"`
	Queue        int           `help:"Sub-requests that may wait; over it those of a lower priority or of the busiest API key give way, or the newcomer is refused with 429." default:"1024"`
	QueueTime    time.Duration `help:"Longest wait; a request whose estimated wait is longer is refused at once with 503." name:"queue-time" default:"10s"`
	MaxBody      bytesize.Size `help:"Largest request body." default:"16MiB" placeholder:"SIZE"`
	MaxBodies    bytesize.Size `help:"Size of the bodies of all requests that have not ended; a request whose body finds no room gets a 503. 0: 64 times --max-body." name:"max-bodies" default:"0" placeholder:"SIZE"`
	APIKeys      string        `help:"File of the API keys of clients (docs/security.md); it is followed while serving. Empty: everybody may do everything." name:"api-keys" type:"path" placeholder:"FILE"`

	serve.TLSFlags     `embed:"" group:"Security"`
	serve.ClusterFlags `embed:"" group:"Security"`
	MaxConns           int `help:"Connections of clients at the same time; further ones are closed at once." default:"16384" group:"Security"`

	traceFlags `embed:""`

	SharedKernelDir string `help:"Folder shared with other processes of this machine; a file in it proves that they share a kernel, and so a clock." type:"path" placeholder:"DIR"`
	ClockListen     string `help:"UDP address of the clock responder." default:":0" placeholder:"HOST:PORT"`
}

// Validate refuses what cannot be, naming option and value.
func (o *options) Validate() error {
	switch {
	case o.Name == "" || len(o.Name) > 128 || strings.ContainsFunc(o.Name, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return fmt.Errorf("--name %q: must be 1 to 128 bytes without spaces", o.Name)
	case o.EmbeddedNats && o.Nats != "":
		return errors.New("--nats and --embedded-nats: want one of them")
	case o.Grace < 0 || o.Grace > time.Hour:
		return fmt.Errorf("--grace %s: must be 0s to 1h", o.Grace)
	case o.Timeout < time.Second:
		return fmt.Errorf("--timeout %s: must be 1s or more", o.Timeout)
	case o.ClientIdle < time.Second:
		return fmt.Errorf("--client-idle %s: must be 1s or more", o.ClientIdle)
	case o.LocalPrefill < 0:
		return fmt.Errorf("--local-prefill-max %d: must be 0 or more", o.LocalPrefill)
	case o.MaxRunning < 0:
		return fmt.Errorf("--max-running %d: must be 0 or more", o.MaxRunning)
	case o.Hedge < 0 || o.Hedge >= 1:
		return fmt.Errorf("--hedge-quantile %v: must be 0 or more, and less than 1", o.Hedge)
	case o.Queue < 1:
		return fmt.Errorf("--queue %d: must be 1 or more", o.Queue)
	case o.QueueTime < time.Millisecond:
		return fmt.Errorf("--queue-time %s: must be 1ms or more", o.QueueTime)
	case o.MaxBody < 1024 || o.MaxBody > math.MaxInt32:
		return fmt.Errorf("--max-body %d: must be from 1KiB to 2GiB", o.MaxBody)
	case o.MaxBodies < 0 || (o.MaxBodies > 0 && o.MaxBodies <= o.MaxBody):
		return fmt.Errorf("--max-bodies %d: must be more than --max-body %d, or 0", o.MaxBodies, o.MaxBody)
	case o.MaxConns < 1:
		return fmt.Errorf("--max-conns %d: must be 1 or more", o.MaxConns)
	case o.Traces == "":
		return errors.New("--traces: want a folder")
	}
	for _, s := range o.statics() {
		if _, err := serve.HostOf(s.URL); err != nil {
			return fmt.Errorf("--%s %q: %w", s.Role, s.URL, err)
		}
	}
	if o.Nats != "" {
		if err := bus.CheckURLs(o.Nats); err != nil {
			return fmt.Errorf("--nats %w", err)
		}
	}
	return nil
}

// policies are those of context and of generation nodes.
func (o *options) policies() (ctx, gen place.Policy) {
	return place.Policy(cmp.Or(o.CtxPolicy, o.Policy)), place.Policy(cmp.Or(o.GenPolicy, o.Policy))
}

func (o *options) statics() []pool.Static {
	var out []pool.Static
	for _, u := range o.Ctx {
		out = append(out, pool.Static{Role: node.RoleCtx, URL: u})
	}
	for _, u := range o.Gen {
		out = append(out, pool.Static{Role: node.RoleGen, URL: u})
	}
	return out
}

func (o *options) natsStore() string {
	if o.NatsStore != "" {
		return o.NatsStore
	}
	return filepath.Join(o.Traces, ".nats")
}

// spool is where the router's own records wait for NATS: beside the traces, which are on a volume.
func (o *options) spool() string { return filepath.Join(o.Traces, ".spool", bus.Token(o.Name)) }

// advertised is the host and the port that others reach this router at.
func advertised(advertise, listening string) (host, port string, err error) {
	host, port, err = net.SplitHostPort(listening)
	if err != nil {
		return "", "", fmt.Errorf("--listen %q: %w", listening, err)
	}
	if h, p, err := net.SplitHostPort(advertise); err == nil {
		return h, p, nil
	}
	if advertise != "" {
		return strings.Trim(advertise, "[]"), port, nil
	}
	if ip := net.ParseIP(host); host == "" || (ip != nil && ip.IsUnspecified()) {
		name, err := os.Hostname()
		if err != nil {
			return "", "", fmt.Errorf("--advertise: the host's name is not known: %w", err)
		}
		return name, port, nil
	}
	return host, port, nil
}
