package bus

import (
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
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// EmbeddedOptions of a server in process.
type EmbeddedOptions struct {
	Listen   string       // host:port; port 0 picks a free one. Explicit, since whoever reaches it may publish.
	StoreDir string       // JetStream's files; a volume in a container
	Logger   *slog.Logger // nil: slog.Default()
	Token    string       // that every client must show; "": none
}

// Embedded is a NATS server in this process.
type Embedded struct {
	o      EmbeddedOptions
	host   string
	server atomic.Pointer[server.Server]
	room   func() error // tells whether the disk takes something; replaced in tests

	refused chan struct{} // poked when the disk refused a write
	stop    context.CancelFunc
	healing sync.WaitGroup
}

const (
	embeddedStart = 10 * time.Second
	healRetry     = time.Second
	healRest      = 10 * time.Second // between two starts, where a disk is full again and again
	healRoom      = 4 << 20          // bytes that a disk must take
)

// StartEmbedded starts the server and returns when it accepts connections.
func StartEmbedded(o EmbeddedOptions) (*Embedded, error) {
	host, portText, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return nil, fmt.Errorf("address %q: want host:port: %w", o.Listen, err)
	}
	port, err := strconv.Atoi(portText)
	if err != nil || port < 0 || port > 65535 {
		return nil, fmt.Errorf("address %q: port %q is no number from 0 to 65535", o.Listen, portText)
	}
	if o.StoreDir == "" {
		return nil, fmt.Errorf("store folder of the embedded NATS server: want a folder, got none")
	}
	if err := os.MkdirAll(o.StoreDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the store folder of the embedded NATS server: %w", err)
	}
	if port == 0 {
		port = server.RANDOM_PORT
	} else if l, err := net.Listen("tcp", o.Listen); err != nil { // the server itself would only say "not ready"
		return nil, err
	} else {
		l.Close()
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	e := &Embedded{o: o, host: host, refused: make(chan struct{}, 1), room: func() error { return takes(o.StoreDir) }}
	if err := e.start(port); err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	e.stop = stop
	e.healing.Go(func() { e.heal(ctx) })
	return e, nil
}

func (e *Embedded) start(port int) error {
	s, err := server.NewServer(&server.Options{
		Host: e.host, Port: port, JetStream: true, StoreDir: e.o.StoreDir, NoSigs: true, ServerName: "meridian-embedded",
		MaxPayload: maxMessage, Authorization: e.o.Token, DisableJetStreamBanner: true,
	})
	if err != nil {
		return fmt.Errorf("configure the embedded NATS server: %w", err)
	}
	s.SetLoggerV2(natsLog{e.o.Logger, e.refused}, false, false, false)
	go s.Start() // returns at once, or when accepting; Shutdown and WaitForShutdown end it
	if !s.ReadyForConnections(embeddedStart) {
		s.Shutdown()
		return fmt.Errorf("start the embedded NATS server on %s: not ready after %v (is the port in use?)", e.o.Listen, embeddedStart)
	}
	e.server.Store(s)
	return nil
}

// heal starts the server anew when its disk, which refused a write, takes some again: until then a stream that was being
// written takes nothing, however much room there is.
func (e *Embedded) heal(ctx context.Context) {
	port := e.Addr().(*net.TCPAddr).Port
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.refused:
		}
		for e.room() != nil {
			if !pause(ctx, healRetry) {
				return
			}
		}
		e.o.Logger.Info("the disk of the embedded NATS server takes writes again; it starts anew", "folder", e.o.StoreDir)
		e.shutdown()
		select {
		case <-e.refused: // by another stream of the server that is gone
		default:
		}
		for err := e.start(port); err != nil; err = e.start(port) {
			e.o.Logger.Error("the embedded NATS server does not start anew", "error", err)
			if !pause(ctx, healRetry) {
				return
			}
		}
		if !pause(ctx, healRest) {
			return
		}
	}
}

// takes tells whether a disk has room for what a stream writes within seconds.
func takes(dir string) error {
	name := filepath.Join(dir, ".room")
	err := os.WriteFile(name, make([]byte, healRoom), 0o600)
	return errors.Join(err, os.Remove(name))
}

// URL is where others reach the server.
func (e *Embedded) URL() string { return e.server.Load().ClientURL() }

// Addr is the address that the server listens on.
func (e *Embedded) Addr() net.Addr { return e.server.Load().Addr() }

// InProcessConn is nats.InProcessConnProvider's.
func (e *Embedded) InProcessConn() (net.Conn, error) { return e.server.Load().InProcessConn() }

// Close stops the server and waits until its files are closed.
func (e *Embedded) Close() {
	e.stop()
	e.healing.Wait()
	e.shutdown()
}

func (e *Embedded) shutdown() {
	s := e.server.Load()
	s.Shutdown()
	s.WaitForShutdown()
}

// natsLog passes the server's warnings on; its chatter at start is debug.
type natsLog struct {
	log     *slog.Logger
	refused chan struct{} // poked when the disk refused a write, which the server only logs
}

func (l natsLog) Noticef(format string, v ...any) { l.line(slog.LevelDebug, format, v) }
func (l natsLog) Warnf(format string, v ...any)   { l.line(slog.LevelWarn, format, v) }
func (l natsLog) Fatalf(format string, v ...any)  { l.line(slog.LevelError, format, v) }
func (l natsLog) Debugf(format string, v ...any)  { l.line(slog.LevelDebug, format, v) }
func (l natsLog) Tracef(string, ...any)           {}

func (l natsLog) Errorf(format string, v ...any) {
	l.line(slog.LevelError, format, v)
	if strings.Contains(strings.ToLower(format), "critical write error") {
		poke(l.refused)
	}
}

// line begins with what is said. Of a client the server says "ADDRESS - cid:NUMBER - " before it, which is another one with every
// connection: a logger that counts lines by their first field would take each for something new.
func (l natsLog) line(level slog.Level, format string, v []any) {
	text := fmt.Sprintf(format, v...)
	if p := strings.SplitN(text, " - ", 3); len(p) == 3 && strings.HasPrefix(p[1], "cid:") {
		l.log.Log(context.Background(), level, "nats", "text", p[2], "client", p[0])
		return
	}
	l.log.Log(context.Background(), level, "nats", "text", text)
}
