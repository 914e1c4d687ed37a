// Package kernel owns the proof that two processes run on one kernel: a unix socket can only be connected to inside the
// kernel that holds it, whether it has an abstract name (one network namespace) or lies in a shared folder (containers
// with a common volume; on a network file system the connection fails, as it should). Equal boot ids prove nothing:
// machines cloned from one snapshot share them. With equal epochs beside it, the two steady clocks are the same clock.
package kernel

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"meridian.internal/shared/clock"
)

// ErrNotProven is returned when no shared kernel could be proven. It does not mean that there is none.
var ErrNotProven = errors.New("kernel: no shared kernel proven")

const (
	greeting   = "meridian-clock"
	maxLine    = 128
	proofLimit = 500 * time.Millisecond
	maxAnchor  = int64(time.Millisecond)
	// acceptAgain is the pause after a connection could not be accepted.
	acceptAgain = 50 * time.Millisecond
)

// Witness answers on unix sockets which clock its process reads.
type Witness struct {
	steady *clock.Steady
	log    *slog.Logger
	ls     []net.Listener
}

// Listen opens the sockets of a process: an abstract one, and one in dir when that is not empty. Where neither is possible
// nothing can be proven, which is no error.
func Listen(dir string, s *clock.Steady, log *slog.Logger) *Witness {
	w := &Witness{steady: s, log: log}
	for _, addr := range addresses(dir, s.ID()) {
		if addr[0] != '@' {
			_ = os.Remove(addr) // of an earlier process with the same random instance: does not happen
		}
		l, err := net.Listen("unix", addr)
		if err != nil {
			log.Info("no proof of a shared kernel here", "addr", addr, "err", err)
			continue
		}
		w.ls = append(w.ls, l)
	}
	return w
}

// addresses are where the process with this clock id can be met. The instance is random for each process.
func addresses(dir string, id clock.ID) []string {
	name := greeting + "-" + id.Instance()
	out := []string{"@" + name}
	if dir != "" {
		out = append(out, filepath.Join(dir, name+".sock"))
	}
	return out
}

// Serve answers until ctx ends.
func (w *Witness) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() {
		for _, l := range w.ls {
			_ = l.Close()
		}
	})
	defer stop()
	var wg sync.WaitGroup
	for _, l := range w.ls {
		wg.Go(func() {
			for {
				switch c, err := l.Accept(); {
				case err == nil:
					w.answer(c)
				case errors.Is(err, net.ErrClosed):
					return
				default: // there is no descriptor left, for example
					time.Sleep(acceptAgain)
				}
			}
		})
	}
	wg.Wait()
	return nil
}

// answer says: greeting, clock id, anchor error in ns.
func (w *Witness) answer(c net.Conn) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(proofLimit))
	if _, err := fmt.Fprintf(c, "%s %s %d\n", greeting, w.steady.ID(), w.steady.AnchorErrNS()); err != nil {
		w.log.Debug("kernel proof not sent", "err", err)
	}
}

// Proof is a proven shared kernel.
type Proof struct {
	How         string // abstract or folder
	AnchorErrNS int64  // of the peer
}

// Prove asks the process that reads the clock id, which must be of our own epoch.
func Prove(ctx context.Context, dir string, own, peer clock.ID) (Proof, error) {
	if own.Epoch() == "" || own.Epoch() != peer.Epoch() {
		return Proof{}, fmt.Errorf("%w: epochs %q and %q", ErrNotProven, own.Epoch(), peer.Epoch())
	}
	ctx, cancel := context.WithTimeout(ctx, proofLimit)
	defer cancel()
	var errs []error
	for _, addr := range addresses(dir, peer) {
		anchor, err := ask(ctx, addr, peer)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		how := "folder"
		if addr[0] == '@' {
			how = "abstract"
		}
		return Proof{how, anchor}, nil
	}
	return Proof{}, fmt.Errorf("%w: %w", ErrNotProven, errors.Join(errs...))
}

func ask(ctx context.Context, addr string, peer clock.ID) (int64, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", addr)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if t, ok := ctx.Deadline(); ok {
		_ = c.SetDeadline(t)
	}
	line, err := bufio.NewReaderSize(c, maxLine).ReadString('\n')
	if err != nil {
		return 0, fmt.Errorf("read kernel proof of %s: %w", peer, err)
	}
	id, anchor, err := parseProof(line)
	if err != nil {
		return 0, err
	}
	if id != peer {
		return 0, fmt.Errorf("%s answers as clock %s", addr, id)
	}
	return anchor, nil
}

func parseProof(line string) (clock.ID, int64, error) {
	f := strings.Fields(line)
	if len(f) != 3 || f[0] != greeting {
		return "", 0, fmt.Errorf("kernel proof %q: want %q, a clock id, the anchor error", line, greeting)
	}
	id, err := clock.ParseID(f[1])
	if err != nil {
		return "", 0, err
	}
	anchor, err := strconv.ParseInt(f[2], 10, 64)
	if err != nil || anchor < 0 || anchor > maxAnchor {
		return "", 0, fmt.Errorf("kernel proof %q: anchor error not within 0 to %d ns", line, maxAnchor)
	}
	return id, anchor, nil
}
