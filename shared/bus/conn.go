package bus

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// ErrClosed is returned when the connection or the publisher was closed by its owner.
var ErrClosed = errors.New("bus: closed")

// Options of a connection.
type Options struct {
	URL      string        // nats://host:port, or several with commas; not needed with Server
	Name     string        // shown in the server's list of connections
	Server   *Embedded     // connect in process, without a socket
	Logger   *slog.Logger  // nil: slog.Default()
	AskFor   time.Duration // how long one answer of JetStream may take; 0: 5 s
	NoEnsure bool          // leave streams and buckets to others
	Token    string        // shown to the server where the URL names no user; "": none
	TLS      *tls.Config   // for servers whose URL begins with tls://; nil: the system's authorities
}

const (
	reconnectWait = 200 * time.Millisecond
	ensureRetry   = 300 * time.Millisecond
	pingInterval  = 2 * time.Second
	dialTimeout   = 2 * time.Second
)

// Conn is a connection that reconnects for ever. Until it is connected, everything that needs the server fails at once
// instead of waiting: nothing is buffered by the client, since the spool is the buffer.
type Conn struct {
	nc     *nats.Conn
	js     jetstream.JetStream
	log    *slog.Logger
	askFor time.Duration

	poke  chan struct{} // a connection was made
	ready chan struct{} // closed when the streams exist for the first time
	stop  context.CancelFunc
	wg    sync.WaitGroup
}

// Connect returns a connection whether or not the server is there. It fails only for an unusable URL.
func Connect(ctx context.Context, o Options) (*Conn, error) {
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.AskFor == 0 {
		o.AskFor = 5 * time.Second
	}
	c := &Conn{log: o.Logger, askFor: o.AskFor, poke: make(chan struct{}, 1), ready: make(chan struct{})}
	if o.Server == nil {
		if err := CheckURLs(o.URL); err != nil {
			return nil, fmt.Errorf("connect to NATS: %w", err)
		}
	}
	nc, err := nats.Connect(o.URL, c.natsOptions(o)...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %q: %w", o.URL, err)
	}
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(o.AskFor))
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("open JetStream at %q: %w", o.URL, err)
	}
	c.nc, c.js = nc, js
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	c.stop = stop
	if o.NoEnsure {
		close(c.ready)
		return c, nil
	}
	if nc.IsConnected() {
		c.wake()
	}
	c.wg.Go(func() { c.maintain(run) })
	return c, nil
}

func (c *Conn) natsOptions(o Options) []nats.Option {
	opts := []nats.Option{
		nats.Name(o.Name), nats.RetryOnFailedConnect(true), nats.MaxReconnects(-1), nats.ReconnectWait(reconnectWait),
		nats.ReconnectBufSize(-1), nats.PingInterval(pingInterval), nats.MaxPingsOutstanding(2), nats.Timeout(dialTimeout),
		nats.IgnoreAuthErrorAbort(),
		nats.ConnectHandler(func(*nats.Conn) { c.wake() }),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			c.log.Info("connected to NATS again", "server", nc.ConnectedUrlRedacted())
			c.wake()
		}),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				c.log.Warn("lost the connection to NATS; records wait in the spool", "error", err)
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			c.log.Warn("NATS reported an error", "error", err)
		}),
	}
	if o.Token != "" {
		opts = append(opts, nats.Token(o.Token))
	}
	if o.TLS != nil && strings.HasPrefix(o.URL, "tls://") {
		opts = append(opts, nats.Secure(o.TLS))
	}
	if o.Server != nil {
		opts = append(opts, nats.InProcessServer(o.Server))
	}
	return opts
}

// CheckURLs wants URLs of NATS servers, with commas between them.
func CheckURLs(list string) error {
	for one := range strings.SplitSeq(list, ",") {
		u, err := url.Parse(strings.TrimSpace(one))
		if err != nil || u.Host == "" || !slices.Contains([]string{"nats", "tls", "ws", "wss"}, u.Scheme) {
			return fmt.Errorf("%q: want nats://host:port, or several with commas", one)
		}
	}
	return nil
}

func (c *Conn) wake() {
	select {
	case c.poke <- struct{}{}:
	default:
	}
}

// maintain makes sure after every connection that the streams exist: a server may come back with an empty store.
func (c *Conn) maintain(ctx context.Context) {
	first := true
	said := "" // the reason that was logged last: a disk may be too small for days
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.poke:
		}
		for c.nc.IsConnected() {
			err := EnsureStreams(ctx, c.js)
			if err == nil {
				said = ""
				if first {
					close(c.ready)
					first = false
				}
				break
			}
			if ctx.Err() != nil {
				return
			}
			if text := err.Error(); text != said {
				c.log.Warn("streams are not ready", "error", text)
				said = text
			}
			if !pause(ctx, ensureRetry) {
				return
			}
		}
	}
}

// Ready waits until the server was reached and the streams and buckets exist.
func (c *Conn) Ready(ctx context.Context) error {
	select {
	case <-c.ready:
		return nil
	default:
	}
	select {
	case <-c.ready:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for NATS: %w", ctx.Err())
	}
}

// Connected says whether the server can be reached now.
func (c *Conn) Connected() bool { return c.nc.IsConnected() }

// NATS is the connection itself.
func (c *Conn) NATS() *nats.Conn { return c.nc }

// JetStream is the JetStream face of the connection.
func (c *Conn) JetStream() jetstream.JetStream { return c.js }

// KV opens a bucket. It fails while the server is away.
func (c *Conn) KV(ctx context.Context, bucket string) (jetstream.KeyValue, error) {
	ctx, cancel := context.WithTimeout(ctx, c.askFor)
	defer cancel()
	kv, err := c.js.KeyValue(ctx, bucket)
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", bucket, err)
	}
	return kv, nil
}

// Close ends the connection. Publishers must have been closed before.
func (c *Conn) Close() {
	c.stop()
	c.wg.Wait()
	c.nc.Close()
}

// pause waits for d; false: ctx ended.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
