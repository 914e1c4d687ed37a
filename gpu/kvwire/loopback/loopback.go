// Package loopback measures what one TCP connection of this host carries: the ceiling that KV by TCP is held against. It owns no
// format and no wait but its own.
package loopback

import (
	"errors"
	"fmt"
	"io"
	"net"
	"time"
)

// limit is for a whole copy.
const limit = time.Minute

// Copy sends so many bytes in pieces over a connection of the loopback address, and gives the time from the first byte to the last
// that the other end has read. Nothing is done with the bytes.
func Copy(bytes, piece int) (time.Duration, error) {
	if bytes < 1 || piece < 1 {
		return 0, fmt.Errorf("copy %d bytes in pieces of %d: want at least 1", bytes, piece)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("listen for a copy of %d bytes: %w", bytes, err)
	}
	defer ln.Close()
	sent := make(chan error, 1)
	go func() { sent <- send(ln.Addr().String(), bytes, piece) }()
	took, err := receive(ln, bytes, piece)
	_ = ln.Close() // a sender that has not connected ends
	if err = errors.Join(err, <-sent); err != nil {
		return 0, fmt.Errorf("copy %d bytes over loopback: %w", bytes, err)
	}
	return took, nil
}

func send(addr string, bytes, piece int) error {
	c, err := net.DialTimeout("tcp", addr, limit)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(limit)); err != nil {
		return err
	}
	b := make([]byte, piece)
	for i := range b { // pages that are there
		b[i] = byte(i)
	}
	for left := bytes; left > 0; {
		n, err := c.Write(b[:min(left, piece)])
		if err != nil {
			return err
		}
		left -= n
	}
	return nil
}

func receive(ln net.Listener, bytes, piece int) (time.Duration, error) {
	if err := ln.(*net.TCPListener).SetDeadline(time.Now().Add(limit)); err != nil {
		return 0, err
	}
	c, err := ln.Accept()
	if err != nil {
		return 0, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(limit)); err != nil {
		return 0, err
	}
	b := make([]byte, piece)
	first, err := c.Read(b)
	if err != nil {
		return 0, err
	}
	from := time.Now()
	for left := bytes - first; left > 0; {
		n, err := io.ReadFull(c, b[:min(left, piece)])
		if err != nil {
			return 0, fmt.Errorf("%d bytes before the end: %w", left-n, err)
		}
		left -= n
	}
	return time.Since(from), nil
}
