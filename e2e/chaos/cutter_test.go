package chaos

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
)

// cutter is a TCP proxy in front of a generation node that breaks connections in the middle of streams: of a leg that begins
// an answer after 1 to most events, of one that goes on with an answer now and then.
type cutter struct {
	ln     net.Listener
	target string
	most   int
	cuts   atomic.Int64

	mu    sync.Mutex // guards r
	r     *rand.Rand
	all   sync.WaitGroup
	alive context.Context // of the connections: it ends with the cutter
	end   context.CancelFunc
}

func newCutter(t *testing.T, target string, most int, seed uint64) *cutter {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{ln: ln, target: strings.TrimPrefix(target, "http://"), most: most, r: rand.New(rand.NewPCG(seed, 1))}
	c.alive, c.end = context.WithCancel(context.Background())
	c.all.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			c.all.Go(func() { c.serve(conn) })
		}
	})
	return c
}

func (c *cutter) url() string { return "http://" + c.ln.Addr().String() }

func (c *cutter) close() {
	_ = c.ln.Close()
	c.end()
	c.all.Wait()
}

// draw gives after how many events to cut; -1: never.
func (c *cutter) draw(resumed bool) int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if resumed && c.r.IntN(5) > 0 {
		return -1
	}
	return int64(2 + c.r.IntN(c.most)) // the first event passes: one that is cut before it has no seam
}

func (c *cutter) serve(down net.Conn) {
	defer down.Close()
	up, err := net.Dial("tcp", c.target)
	if err != nil {
		return
	}
	defer up.Close()
	defer context.AfterFunc(c.alive, func() { _ = up.Close(); _ = down.Close() })()
	var left atomic.Int64 // events until the cut
	left.Store(-1)
	c.all.Go(func() {
		defer up.Close()
		defer down.Close()
		copyWith(up, down, func(b []byte) bool {
			if bytes.Contains(b, []byte("POST /v1/")) && !bytes.Contains(b, []byte("X-Meridian-Probe")) {
				left.Store(c.draw(bytes.Contains(b, []byte(`"output_token_ids"`))))
			}
			return true
		})
	})
	copyWith(down, up, func(b []byte) bool {
		n := int64(bytes.Count(b, []byte("data: ")))
		if l := left.Load(); l < 0 || n == 0 || left.Add(-n) > 0 {
			return true
		}
		c.cuts.Add(1)
		_ = down.(*net.TCPConn).SetLinger(0) // a reset, as of a host that dies
		return false
	})
}

// copyWith copies what look allows; the piece at which it says no is lost.
func copyWith(dst io.Writer, src io.Reader, look func([]byte) bool) {
	buf := make([]byte, 64<<10)
	for {
		n, err := src.Read(buf)
		if err != nil || !look(buf[:n]) {
			return
		}
		if _, err := dst.Write(buf[:n]); err != nil {
			return
		}
	}
}
