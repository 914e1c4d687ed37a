package bus

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
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
type Embedded struct{ server *server.Server }

const embeddedStart = 10 * time.Second

// StartEmbedded starts the server and returns when it accepts connections.
func StartEmbedded(o EmbeddedOptions) (*Embedded, error) {
	host, portText, err := net.SplitHostPort(o.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen address of the embedded NATS server %q: want host:port: %w", o.Listen, err)
	}
	port, err := strconv.Atoi(portText)
	if err != nil || port < 0 || port > 65535 {
		return nil, fmt.Errorf("listen address of the embedded NATS server %q: port %q is no number from 0 to 65535", o.Listen, portText)
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
		return nil, fmt.Errorf("listen address of the embedded NATS server: %w", err)
	} else {
		l.Close()
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	s, err := server.NewServer(&server.Options{
		Host: host, Port: port, JetStream: true, StoreDir: o.StoreDir, NoSigs: true, ServerName: "meridian-embedded",
		MaxPayload: maxMessage, Authorization: o.Token, DisableJetStreamBanner: true,
	})
	if err != nil {
		return nil, fmt.Errorf("configure the embedded NATS server: %w", err)
	}
	s.SetLoggerV2(natsLog{o.Logger}, false, false, false)
	go s.Start() // returns at once, or when accepting; Shutdown and WaitForShutdown end it
	if !s.ReadyForConnections(embeddedStart) {
		s.Shutdown()
		return nil, fmt.Errorf("start the embedded NATS server on %s: not ready after %v (is the port in use?)", o.Listen, embeddedStart)
	}
	return &Embedded{server: s}, nil
}

// URL is where others reach the server.
func (e *Embedded) URL() string { return e.server.ClientURL() }

// Addr is the address that the server listens on.
func (e *Embedded) Addr() net.Addr { return e.server.Addr() }

// Close stops the server and waits until its files are closed.
func (e *Embedded) Close() {
	e.server.Shutdown()
	e.server.WaitForShutdown()
}

// natsLog passes the server's warnings on; its chatter at start is debug.
type natsLog struct{ log *slog.Logger }

func (l natsLog) Noticef(format string, v ...any) { l.line(slog.LevelDebug, format, v) }
func (l natsLog) Warnf(format string, v ...any)   { l.line(slog.LevelWarn, format, v) }
func (l natsLog) Fatalf(format string, v ...any)  { l.line(slog.LevelError, format, v) }
func (l natsLog) Errorf(format string, v ...any)  { l.line(slog.LevelError, format, v) }
func (l natsLog) Debugf(format string, v ...any)  { l.line(slog.LevelDebug, format, v) }
func (l natsLog) Tracef(string, ...any)           {}

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
