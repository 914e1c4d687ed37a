package sock

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"testing"
	"time"
)

// pair is a connection over TCP and one in memory, which has no socket.
func pair(t *testing.T, tcp bool) (*Conn, net.Conn) {
	t.Helper()
	a, b := net.Pipe()
	if tcp {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		if a, err = net.Dial("tcp", l.Addr().String()); err != nil {
			t.Fatal(err)
		}
		if b, err = l.Accept(); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	c := New(a)
	if (c.Raw() != nil) != tcp {
		t.Fatalf("socket: %v", c.Raw())
	}
	return c, b
}

func both(t *testing.T, f func(t *testing.T, c *Conn, peer net.Conn)) {
	for name, tcp := range map[string]bool{"tcp": true, "pipe": false} {
		t.Run(name, func(t *testing.T) {
			c, peer := pair(t, tcp)
			f(t, c, peer)
		})
	}
}

func TestFillDiscardRead(t *testing.T) {
	both(t, func(t *testing.T, c *Conn, peer net.Conn) {
		go func() { _, _ = io.WriteString(peer, "head body") }()
		for len(c.Buffered()) < 9 {
			if err := c.Fill(); err != nil {
				t.Fatal(err)
			}
		}
		line := c.Buffered()[:5]
		c.Discard(5)
		if string(line) != "head " || string(c.Buffered()) != "body" {
			t.Errorf("%q, then %q", line, c.Buffered())
		}
		small := make([]byte, 3)
		if n, err := c.Read(small); n != 3 || err != nil || string(small) != "bod" {
			t.Errorf("%d %v %q", n, err, small)
		}
		go func() { _, _ = peer.Write(bytes.Repeat([]byte("z"), 5*bufferBytes)); peer.Close() }()
		for {
			if err := c.Fill(); err != nil { // behind what is there: the buffer grows
				if !errors.Is(err, io.EOF) {
					t.Error(err)
				}
				break
			}
		}
		if len(c.Buffered()) != 1+5*bufferBytes {
			t.Errorf("%d bytes are buffered", len(c.Buffered()))
		}
		rest, err := io.ReadAll(c)
		if len(rest) != 1+5*bufferBytes || err != nil {
			t.Errorf("%d bytes, %v", len(rest), err)
		}
	})
}

func TestNoBufferIsHeldWhileASocketWaits(t *testing.T) {
	c, peer := pair(t, true)
	for range 3 {
		got := make(chan error)
		go func() { got <- c.Fill() }()
		time.Sleep(10 * time.Millisecond) // most likely it waits by now
		if _, err := io.WriteString(peer, "x"); err != nil {
			t.Fatal(err)
		}
		if err := <-got; err != nil || string(c.Buffered()) != "x" {
			t.Fatalf("%v %q", err, c.Buffered())
		}
		c.Discard(1)
	}
	c.Release()
	if c.buf != nil || c.pooled != nil {
		t.Error("an empty buffer is held")
	}
}

func TestDeadlines(t *testing.T) {
	both(t, func(t *testing.T, c *Conn, peer net.Conn) {
		for range 2 {
			c.ReadBy(time.Now().Add(10 * time.Millisecond))
			if err := c.Fill(); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("got %v", err)
			}
		}
		c.ReadBy(time.Time{})
		go func() { _, _ = io.WriteString(peer, "x") }()
		if err := c.Fill(); err != nil {
			t.Errorf("after one that passed: %v", err)
		}
		c.WriteBy(time.Now().Add(10 * time.Millisecond))
		var err error
		for n := 0; err == nil && n < 1000; n++ {
			_, err = c.Write(make([]byte, 64<<10)) // until nothing fits
		}
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("write: %v", err)
		}
	})
}

func TestNothingWaitsNow(t *testing.T) {
	c, peer := pair(t, true)
	if err := c.FillNow(); err != nil || len(c.Buffered()) != 0 || c.buf != nil {
		t.Fatalf("nothing was sent: %v, %q; a buffer is held: %t", err, c.Buffered(), c.buf != nil)
	}
	if _, err := io.WriteString(peer, "x"); err != nil {
		t.Fatal(err)
	}
	for len(c.Buffered()) == 0 { // it is on its way
		if err := c.FillNow(); err != nil {
			t.Fatal(err)
		}
	}
	sent, large := 0, make([]byte, 1<<20)
	for {
		n, err := c.WriteNow(large)
		if err != nil {
			t.Fatal(err)
		}
		if sent += n; n < len(large) {
			break // nothing fits any more, and nobody reads
		}
	}
	go func() { _, _ = c.Write([]byte("end")) }() // this one waits
	if _, err := io.ReadFull(peer, make([]byte, sent)); err != nil {
		t.Fatal(err)
	}
	end := make([]byte, 3)
	if _, err := io.ReadFull(peer, end); err != nil || string(end) != "end" {
		t.Errorf("%q, %v", end, err)
	}
	peer.Close()
	for err := error(nil); !errors.Is(err, io.EOF); err = c.FillNow() {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestCloseEndsAWait(t *testing.T) {
	both(t, func(t *testing.T, c *Conn, _ net.Conn) {
		got := make(chan error)
		go func() { got <- c.Fill() }()
		c.Close()
		if err := <-got; err == nil {
			t.Error("a closed connection gave bytes")
		}
	})
}

func TestWriteNeedsNoReader(t *testing.T) {
	both(t, func(t *testing.T, c *Conn, peer net.Conn) {
		sent := bytes.Repeat([]byte("0123456789"), 200<<10)
		go func() { _, _ = c.Write(sent); c.Close() }()
		got, err := io.ReadAll(peer)
		if err != nil || !bytes.Equal(got, sent) {
			t.Errorf("%d bytes of %d, %v", len(got), len(sent), err)
		}
	})
}

func TestQuiet(t *testing.T) {
	c, peer := pair(t, true)
	if !c.Quiet() {
		t.Error("nothing was sent")
	}
	_, _ = io.WriteString(peer, "x")
	for c.Quiet() {
		time.Sleep(time.Millisecond) // it is on its way
	}
	if err := c.Fill(); err != nil || string(c.Buffered()) != "x" {
		t.Errorf("the look took it: %v %q", err, c.Buffered())
	}
	if !c.Quiet() {
		t.Error("all was read")
	}
	c.ReadBy(time.Now().Add(time.Millisecond))
	if err := c.Fill(); err == nil {
		t.Error("nothing was sent, and yet something came")
	}
	c.ReadBy(time.Time{})
	if !c.Quiet() {
		t.Error("a deadline that has passed is no word of the other side")
	}
	peer.Close()
	for c.Quiet() {
		time.Sleep(time.Millisecond)
	}
}

// Pieces arrive whole and in order, also where the other side takes them slowly, and where they are many or empty.
func TestWriteAll(t *testing.T) {
	both(t, func(t *testing.T, c *Conn, peer net.Conn) {
		for name, sizes := range map[string][]int{
			"few": {10, 1, 100}, "some empty": {0, 5, 0}, "large": {300, 3 << 20, 4 << 20, 1}, "many": slices.Repeat([]int{7}, 50), "none": nil,
		} {
			var pieces [][]byte
			var want []byte
			for i, n := range sizes {
				pieces = append(pieces, bytes.Repeat([]byte{byte('a' + i)}, n))
				want = append(want, pieces[i]...)
			}
			done := make(chan error, 1)
			go func() { done <- c.WriteAll(pieces) }()
			got := make([]byte, len(want))
			if _, err := io.ReadFull(peer, got); err != nil {
				t.Fatal(err)
			}
			if err := <-done; err != nil || !bytes.Equal(got, want) {
				t.Errorf("%s: %v; %d bytes came that are not those", name, err, len(got))
			}
		}
		peer.Close()
		err := c.WriteAll([][]byte{{1}, {2}})
		for i := 0; err == nil && i < 1000; i++ {
			err = c.WriteAll([][]byte{{1}, {2}})
		}
		if err == nil {
			t.Error("it can be written to a connection whose other side is closed")
		}
	})
}

// What is asked arrives whole, also where the other side takes it slowly, and the answer is there for Fill.
func TestAsk(t *testing.T) {
	both(t, func(t *testing.T, c *Conn, peer net.Conn) {
		for _, size := range []int{1, 5 << 20, 7} {
			want := bytes.Repeat([]byte("x"), size)
			answered := make(chan error, 1)
			go func() {
				_, err := io.ReadFull(peer, make([]byte, size))
				if err == nil {
					_, err = io.WriteString(peer, "answer")
				}
				answered <- err
			}()
			if err := c.Ask(want); err != nil {
				t.Fatal(err)
			}
			for len(c.Buffered()) < len("answer") {
				if err := c.Fill(); err != nil {
					t.Fatal(err)
				}
			}
			if err := <-answered; err != nil || string(c.Buffered()) != "answer" {
				t.Errorf("%d bytes: %v, %q", size, err, c.Buffered())
			}
			c.Discard(len("answer"))
		}
		c.ReadBy(time.Now().Add(10 * time.Millisecond))
		go func() { _, _ = io.ReadFull(peer, make([]byte, 2)) }()
		for range 2 { // the second finds a deadline that has passed
			if err := c.Ask([]byte("x")); err != nil {
				t.Error(err)
			}
			if err := c.Fill(); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("no answer: %v", err)
			}
		}
		c.ReadBy(time.Time{})
		go func() { c.Close() }()
		if c.Ask([]byte("x")) == nil && c.Fill() == nil {
			t.Error("a closed connection answers")
		}
	})
}

// What is written last arrives whole and is told of once; then what comes next is waited for, unless nothing is to come.
func TestWriteLast(t *testing.T) {
	both(t, func(t *testing.T, c *Conn, peer net.Conn) {
		for _, goesOn := range []bool{true, false} {
			for _, size := range []int{1, 5 << 20, 7} {
				rested := make(chan struct{}, 2)
				done := make(chan error, 1)
				go func() {
					err := c.WriteLast(bytes.Repeat([]byte("x"), size), func() bool { rested <- struct{}{}; return goesOn })
					if err == nil && goesOn {
						err = c.Fill()
					}
					done <- err
				}()
				if _, err := io.ReadFull(peer, make([]byte, size)); err != nil {
					t.Fatal(err)
				}
				<-rested
				if goesOn {
					if _, err := io.WriteString(peer, "next"); err != nil {
						t.Fatal(err)
					}
				}
				if err := <-done; err != nil || goesOn && string(c.Buffered()) != "next" || len(rested) > 0 {
					t.Errorf("%d bytes, goes on %t: %v, %q, told %d times more", size, goesOn, err, c.Buffered(), len(rested))
				}
				c.Discard(len(c.Buffered()))
			}
		}
		c.Close()
		if c.WriteLast([]byte("x"), func() bool { t.Error("told of a write that failed"); return true }) == nil {
			t.Error("a closed connection takes bytes")
		}
	})
}

// What was there before the last was written is not waited for: nobody is woken for it any more.
func TestWriteLastSeesWhatWasThereBefore(t *testing.T) {
	for name, say := range map[string]func(peer net.Conn){
		"bytes": func(peer net.Conn) { _, _ = io.WriteString(peer, "early") },
		"end":   func(peer net.Conn) { _ = peer.(*net.TCPConn).CloseWrite() },
	} {
		t.Run(name, func(t *testing.T) {
			c, peer := pair(t, true)
			say(peer)
			for c.Quiet() {
				time.Sleep(time.Millisecond) // it is on its way
			}
			written := make(chan error, 1)
			go func() { written <- c.WriteLast([]byte("x"), func() bool { return true }) }()
			select {
			case err := <-written:
				if err != nil {
					t.Error(err)
				}
			case <-time.After(time.Minute):
				t.Fatal("it waits for what is there")
			}
		})
	}
}

// TestADeadlineThatAWaitLeftIsNotInTheWayOfAWriteThatDoesNotWait: who was slow once is not cut for it later.
func TestADeadlineThatAWaitLeftIsNotInTheWayOfAWriteThatDoesNotWait(t *testing.T) {
	c, peer := pair(t, true)
	c.WriteBy(time.Now().Add(time.Minute))
	go func() { _, _ = io.Copy(io.Discard, peer) }()
	for large := make([]byte, 8<<20); c.writes.has.IsZero(); { // until one has to wait
		if _, err := c.Write(large); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Conn.SetWriteDeadline(time.Unix(1, 0)); err != nil { // it passes
		t.Fatal(err)
	}
	if n, err := c.WriteNow([]byte("x")); n != 1 || err != nil {
		t.Errorf("wrote %d bytes, %v", n, err)
	}
}
