// Package ports keeps TCP ports for servers that start later, or again: an address that others must know before its server
// has it, or that a server must find free when it comes back. It listens at none of them.
package ports

import (
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"strconv"
)

// Ports from here on are kept. The kernel gives none of them to a socket that asks for any port: those begin at 32768 on Linux.
// A port of theirs that is free now is somebody's the next moment, on a machine where much is started.
const (
	first = 20_000
	end   = 32_000
)

// Keep keeps n ports of a host at which nobody listens, until release or the end of the process. On Linux no other process
// that asks here gets them meanwhile.
func Keep(host string, n int) (kept []string, release func(), err error) {
	return keep(host, n, first, end)
}

// keep is Keep with ports from first to before end.
func keep(host string, n, first, end int) (kept []string, release func(), err error) {
	var marks []net.Listener
	release = func() {
		for _, m := range marks {
			_ = m.Close()
		}
	}
	from := rand.IntN(end - first)
	for i := 0; i < end-first && len(kept) < n; i++ {
		port := first + (from+i)%(end-first)
		m, err := mark(port)
		if err != nil {
			continue // another process keeps it
		}
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err != nil {
			_ = m.Close()
			continue // it is in use
		}
		_ = l.Close()
		marks, kept = append(marks, m), append(kept, strconv.Itoa(port))
	}
	if len(kept) < n {
		release()
		return nil, nil, fmt.Errorf("keep %d ports of %s: only %d from %d to %d can be had", n, host, len(kept), first, end-1)
	}
	return kept, release, nil
}

// mark tells other processes that a port is kept, by a name that ends with this one.
func mark(port int) (net.Listener, error) {
	if runtime.GOOS != "linux" {
		return nobody{}, nil // no such names
	}
	return net.Listen("unix", fmt.Sprintf("@meridian-port-%d", port))
}

// nobody is the mark that there is none.
type nobody struct{ net.Listener }

func (nobody) Close() error { return nil }
