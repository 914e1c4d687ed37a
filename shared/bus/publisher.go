package bus

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// PublisherOptions of one process's records.
type PublisherOptions struct {
	SpoolDir string       // private folder of this node: see DefaultSpoolDir
	MaxBytes int64        // the spool's limit on disk; over it new records are dropped and counted. 0: 256 MiB
	Logger   *slog.Logger // nil: slog.Default()
	// Hold is how long records wait in the spool at least before they are sent, and twice that at most: those given to
	// PublishHeld may be acknowledged meanwhile. 0: they do not wait.
	Hold time.Duration
}

// Stats are the counts of a publisher since it was opened: Emitted + Recovered = Stored + Dropped + Pending.
type Stats struct {
	Emitted   int64 // messages given to Publish
	Recovered int64 // messages that an earlier process left in the spool
	Stored    int64 // acknowledged by JetStream, or at their place without it
	Dropped   int64 // lost: spool full and memory full, or too large for a stream
	Pending   int64 // on their way
	Bytes     int64 // size of the spool on disk
}

const (
	ackWait     = 5 * time.Second
	retryFirst  = 100 * time.Millisecond
	retryMax    = 2 * time.Second
	warnEvery   = time.Minute
	maxInMemory = 1024 // messages kept when the disk refuses them
	maxOldSend  = 512  // messages sent before their acknowledgements are awaited
)

// Publisher takes records to JetStream by way of the spool. Safe for concurrent use.
type Publisher struct {
	conn  *Conn
	log   *slog.Logger
	spool *spool
	send  func(context.Context, []entry) error // replaced in tests
	seq   atomic.Int64
	held  held

	emitted, stored, dropped atomic.Int64
	recovered                int64

	mu       sync.Mutex // guards memory and warned
	memory   []entry    // what the disk refused
	warned   time.Time  // of it
	notify   chan struct{}
	settled  chan struct{} // poked when the sender has nothing left
	stop     context.CancelFunc
	closing  chan struct{} // closed when nothing is held back any more
	finished chan struct{}
	done     position // owned by the sender until finished is closed
}

// DefaultSpoolDir is a private folder for node's records to the stream at url: under the user's cache folder, or the
// folder for temporary files, or (in an image that has neither) the working folder.
func DefaultSpoolDir(node, url string) string {
	sum := sha256.Sum256([]byte(url + "\x00" + StreamPhases))
	name := Token(node) + "-" + hex.EncodeToString(sum[:4])
	if base, err := os.UserCacheDir(); err == nil {
		return filepath.Join(base, "meridian", "spool", name)
	}
	if info, err := os.Stat(os.TempDir()); err == nil && info.IsDir() {
		return filepath.Join(os.TempDir(), "meridian-spool-"+strconv.Itoa(os.Getuid()), name)
	}
	return filepath.Join(".meridian-spool", name)
}

// NewPublisher opens the spool, and starts to send what an earlier process left in it.
func NewPublisher(conn *Conn, o PublisherOptions) (*Publisher, error) {
	p, err := newPublisher(o)
	if err != nil {
		return nil, err
	}
	p.conn = conn
	p.send = p.sendJetStream
	p.start()
	return p, nil
}

func newPublisher(o PublisherOptions) (*Publisher, error) {
	if o.SpoolDir == "" {
		return nil, fmt.Errorf("open spool: no folder given")
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = defaultSpoolMax
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	s, start, found, err := openSpool(o.SpoolDir, o.MaxBytes, min(defaultSegment, max(o.MaxBytes/4, 1)))
	if err != nil {
		return nil, err
	}
	if found > 0 {
		o.Logger.Info("found unsent records in the spool", "messages", found, "folder", o.SpoolDir)
	}
	return &Publisher{
		log: o.Logger, spool: s, recovered: found, done: start,
		notify: make(chan struct{}, 1), settled: make(chan struct{}, 1), finished: make(chan struct{}),
		held: held{time: o.Hold}, closing: make(chan struct{}),
	}, nil
}

func (p *Publisher) start() {
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	r := newSpoolReader(p.spool, p.done)
	if p.held.time > 0 {
		old := p.spool.last() // what an earlier process left is not held
		r.limit = &old
	}
	go func() {
		defer close(p.finished)
		p.run(ctx, r)
	}()
	poke(p.notify)
}

// Publish takes rec. When it returns nil, rec is in the spool: it survives the death of this process. It never waits for
// the server. An error says that the record is lost (and counted), which is no reason to fail the request.
func (p *Publisher) Publish(rec *phase.Record) error { return p.PublishWithSteps(rec, nil) }

// PublishWithSteps takes rec and its step columns, which travel as messages of their own; it sets rec.StepMessages.
func (p *Publisher) PublishWithSteps(rec *phase.Record, steps *infer.StepRecords) error {
	parts := phase.AppendSteps(rec, steps)
	rec.StepMessages = len(parts)
	subject := PhaseSubject(rec.Router, rec.Role, rec.Node)
	entries := make([]entry, 0, 1+len(parts))
	for _, part := range parts {
		entries = append(entries, entry{subject: subject, id: p.nextID(rec), kind: kindSteps, data: part})
	}
	entries = append(entries, entry{subject: subject, id: p.nextID(rec), kind: kindRecord, data: phase.Append(nil, rec)})
	_, _, err := p.put(entries)
	return err
}

func (p *Publisher) nextID(rec *phase.Record) string {
	return string(rec.Instance) + "." + strconv.FormatInt(p.seq.Add(1), 10)
}

// put takes messages, and says where in the spool they are: nowhere when memory has them.
func (p *Publisher) put(entries []entry) (from, to position, err error) {
	n := int64(len(entries))
	p.emitted.Add(n)
	from, to, err = p.spool.append(entries...)
	if err != nil && !p.keepInMemory(entries, err) {
		if p.dropped.Add(n) == n {
			p.log.Error("records are being dropped", "error", err)
		}
		return from, to, fmt.Errorf("keep record: %w", err)
	}
	poke(p.notify)
	return from, to, nil
}

// keepInMemory takes what a failing disk refused. A spool that is full has too much already, and what is too large stays so.
func (p *Publisher) keepInMemory(entries []entry, err error) bool {
	if errors.Is(err, ErrSpoolFull) || errors.Is(err, ErrTooLarge) || errors.Is(err, ErrClosed) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.memory)+len(entries) > maxInMemory {
		return false
	}
	if now := time.Now(); now.Sub(p.warned) > warnEvery { // they leave memory at once where the server is there
		p.log.Warn("spool refuses records; keeping some in memory", "error", err)
		p.warned = now
	}
	for _, e := range entries {
		e.data = bytes.Clone(e.data) // the caller uses its memory again
		p.memory = append(p.memory, e)
	}
	return true
}

// run is the sender: it alone reads the spool.
func (p *Publisher) run(ctx context.Context, r *spoolReader) {
	defer r.close()
	for {
		worked, err := p.sendSome(ctx, r)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			p.log.Warn("spool cannot be read", "error", err)
		case worked:
			continue
		}
		poke(p.settled)
		select {
		case <-ctx.Done():
			return
		case <-p.notify:
		}
		if !p.age(ctx, r) {
			return
		}
	}
}

// sendSome sends the next entries of the spool, or else those in memory, until they are acknowledged.
func (p *Publisher) sendSome(ctx context.Context, r *spoolReader) (bool, error) {
	if n := p.held.pass(r); n > 0 {
		p.stored.Add(n)
		p.done = r.at
		return true, p.spool.commit(r.at)
	}
	entries, err := r.next()
	if err != nil {
		return false, err
	}
	if n := len(entries); n > 0 {
		entries = p.held.unsettled(entries)
		p.stored.Add(int64(n - len(entries)))
		if p.sendAll(ctx, entries) > 0 {
			return false, nil
		}
		p.done = r.at
		return true, p.spool.commit(r.at)
	}
	p.mu.Lock()
	entries, p.memory = p.memory, nil
	p.mu.Unlock()
	if len(entries) == 0 {
		return false, nil
	}
	p.dropped.Add(int64(p.sendAll(ctx, entries))) // nobody else has them
	return true, nil
}

// sendAll retries until all entries are acknowledged, and counts them. It returns how many are left, where ctx ended first.
func (p *Publisher) sendAll(ctx context.Context, entries []entry) (left int) {
	told := false
	whole := len(entries)
	entries = slices.DeleteFunc(entries, func(e entry) bool { return len(e.subject) > maxSubject }) // of an earlier version
	p.dropped.Add(int64(whole - len(entries)))
	for len(entries) > 0 {
		part := entries[:min(len(entries), maxOldSend)]
		for wait := retryFirst; ; wait = min(2*wait, retryMax) {
			err := p.send(ctx, part)
			if err == nil {
				break
			}
			if ctx.Err() != nil {
				return len(entries)
			}
			p.log.Debug("records wait for the server", "error", err)
			if wait == retryMax && !told && !errors.Is(err, nats.ErrDisconnected) { // of which the connection tells
				p.log.Warn("the server has taken no records for some seconds; they wait in the spool", "error", err)
				told = true
			}
			if !p.waitForServer(ctx, wait) {
				return len(entries)
			}
		}
		p.stored.Add(int64(len(part)))
		entries = entries[len(part):]
	}
	if told {
		p.log.Info("the server takes records again")
	}
	return 0
}

func (p *Publisher) waitForServer(ctx context.Context, wait time.Duration) bool {
	if p.conn != nil && p.conn.Ready(ctx) != nil {
		return false
	}
	return pause(ctx, wait)
}

// sendJetStream publishes entries and waits for every acknowledgement. Duplicates of an earlier try are recognised by the
// server.
func (p *Publisher) sendJetStream(ctx context.Context, entries []entry) error {
	if !p.conn.Connected() {
		return nats.ErrDisconnected
	}
	acks := make([]jetstream.PubAckFuture, 0, len(entries))
	for _, e := range entries {
		m := &nats.Msg{Subject: e.subject, Data: e.data, Header: nats.Header{jetstream.MsgIDHeader: {e.id}}}
		if e.kind == kindSteps {
			m.Header.Set(HeaderKind, KindSteps)
		}
		f, err := p.conn.js.PublishMsgAsync(m)
		if err != nil {
			return fmt.Errorf("publish to %s: %w", e.subject, err)
		}
		acks = append(acks, f)
	}
	deadline := time.NewTimer(ackWait)
	defer deadline.Stop()
	for i, f := range acks {
		select {
		case <-f.Ok():
		case err := <-f.Err():
			return fmt.Errorf("publish to %s: %w", entries[i].subject, err)
		case <-deadline.C:
			return fmt.Errorf("publish to %s: no acknowledgement within %v", entries[i].subject, ackWait)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// Flush waits until everything published so far is acknowledged.
func (p *Publisher) Flush(ctx context.Context) error {
	for p.Stats().Pending > 0 {
		poke(p.notify)
		select {
		case <-p.settled:
		case <-p.finished:
			return ErrClosed
		case <-ctx.Done():
			return fmt.Errorf("flush %d records to NATS: %w", p.Stats().Pending, ctx.Err())
		}
	}
	return nil
}

// Close flushes until ctx ends, then lets go of the spool; what is left is sent by the next process with this folder.
func (p *Publisher) Close(ctx context.Context) error {
	close(p.closing)
	err := p.Flush(ctx)
	p.stop()
	<-p.finished
	p.spool.close(p.done)
	return err
}

// Stats returns the counts now.
func (p *Publisher) Stats() Stats {
	s := Stats{Recovered: p.recovered, Stored: p.stored.Load(), Dropped: p.dropped.Load(), Bytes: p.spool.bytes()}
	s.Emitted = p.emitted.Load() // read last: a record is counted here before it can be counted above
	s.Pending = s.Emitted + s.Recovered - s.Stored - s.Dropped
	return s
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
