package worker

import (
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/clock"
	"meridian.internal/shared/serve"
)

// Flags are the options that both kinds of node have beside those of the device. --listen is the node's own, because its
// default differs.
type Flags struct {
	Name            string        `help:"Name of the node, unique in the cluster. Empty: role and host name."`
	Advertise       string        `help:"Host, or host:port, that others reach this node at. Empty: the address of --listen, or the host's name if that is every address." placeholder:"HOST[:PORT]"`
	NATS            string        `help:"NATS servers, with commas. Empty: no registration and no records." name:"nats" placeholder:"URL"`
	Spool           string        `help:"Private folder in which records wait for NATS. Empty: a folder of the user's cache, by node and server." type:"path" placeholder:"DIR"`
	Grace           time.Duration `help:"Time that running requests get after SIGTERM." default:"10s"`
	LedgerFlags     `embed:""`
	ClockListen     string      `help:"UDP address of the clock responder." default:":0" placeholder:"HOST:PORT"`
	SharedKernelDir string      `help:"Folder shared with other processes of this machine; a file in it proves that they share a kernel, and so a clock." type:"path" placeholder:"DIR"`
	Clock           clock.Flags `embed:"" group:"Test mode"`

	serve.ClusterFlags `embed:"" group:"Security"`
}

// Validate refuses what cannot be, naming option and value.
func (f *Flags) Validate() error {
	switch {
	case f.Grace < 0 || f.Grace > time.Hour:
		return fmt.Errorf("--grace %s: must be 0s to 1h", f.Grace)
	case len(f.Name) > 128 || strings.ContainsFunc(f.Name, func(r rune) bool { return r <= ' ' || r == 0x7f }):
		return fmt.Errorf("--name %q: must be 1 to 128 bytes without spaces", f.Name)
	}
	if f.NATS != "" {
		if err := bus.CheckURLs(f.NATS); err != nil {
			return fmt.Errorf("--nats %w", err)
		}
	}
	return f.LedgerFlags.validate()
}

// hosts of a node: what others dial.
type hosts struct {
	http string // host:port
	host string
}

// advertised derives what others dial from --advertise and the address that is listened at.
func advertised(advertise, listening string) (hosts, error) {
	host, port, err := net.SplitHostPort(listening)
	if err != nil {
		return hosts{}, fmt.Errorf("--listen %q: %w", listening, err)
	}
	if advertise == "" {
		if ip := net.ParseIP(host); host == "" || (ip != nil && ip.IsUnspecified()) {
			host = hostName()
		}
		return hosts{http: net.JoinHostPort(host, port), host: host}, nil
	}
	advertise = strings.TrimPrefix(strings.TrimPrefix(advertise, "https://"), "http://")
	if h, p, err := net.SplitHostPort(advertise); err == nil {
		host, port = h, p
	} else {
		host = strings.Trim(advertise, "[]")
	}
	if host == "" || strings.ContainsAny(host, "/ ") {
		return hosts{}, fmt.Errorf("--advertise %q: want host or host:port", advertise)
	}
	return hosts{http: net.JoinHostPort(host, port), host: host}, nil
}

// hostName is the host's name if it has an address, else the loopback address: a machine without a network serves itself.
func hostName() string {
	name, err := os.Hostname()
	if err != nil {
		return loopback
	}
	if addrs, err := net.LookupHost(name); err != nil || len(addrs) == 0 {
		return loopback
	}
	return name
}

const loopback = "127.0.0.1"
