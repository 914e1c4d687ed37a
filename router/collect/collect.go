// Package collect owns the way from phase records to lines on disk: it gathers the records of each request, has
// router/timeline merge them, appends the line, and only then acknowledges the records to JetStream.
//
// One goroutine (Run) owns the requests and the files; everybody else sends to it. Redelivered records are recognised, a
// record that comes after its line was written amends it, and memory is bounded: under a flood the oldest requests are
// written as they are, and counted.
package collect

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
	"meridian.internal/router/traces"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// ErrBusy is returned by Add when the collector cannot take the record now. If there is a publisher, it comes by way of
// the stream nevertheless.
var ErrBusy = errors.New("collect: busy")

// Options of a collector. Router and Dir are required.
type Options struct {
	Router    string                // name of this router: its subjects are consumed
	Dir       string                // folder of the traces
	Conn      *bus.Conn             // nil: only records given to Add
	Publisher *bus.Publisher        // keeps the router's own records; nil: they live in memory only
	Grace     time.Duration         // how long a line waits for records after its request ended; 0: 2 s
	Orphan    time.Duration         // how long records wait for a router's record that nobody announced; 0: 60 s
	Flush     time.Duration         // how long a merged line may wait for the disk; 0: 100 ms
	AdoptLook time.Duration         // how often routers that are gone are looked for, whose records nobody takes; 0: 3 s
	MaxOpen   int                   // requests in memory; over it the oldest is written as it is. 0: 200,000
	Recent    int                   // lines kept for Recent; 0: 1,000
	Clocks    timeline.Clocks       // how stamps get onto this router's clock
	OnLine    func(*timeline.Line)  // called by Run with every line that was written; must not block
	Registry  prometheus.Registerer // nil: no metrics
	Logger    *slog.Logger          // nil: slog.Default()
	Strangers *slog.Logger          // for records that cannot be read; nil: Logger
	MaxBytes  int64                 // size at which files are rotated; 0: 256 MiB
	MaxTotal  int64                 // size of all files of timelines; the oldest are removed. 0: no limit
	Compress  bool                  // files that are complete are compressed
	Sync      bool                  // lines are synced to the disk before their records are acknowledged
}

// Collector merges. Its methods are safe for concurrent use.
type Collector struct {
	o        Options
	log      *slog.Logger
	in       chan message
	hurry    chan struct{} // one token: somebody waits for a line, or a batch is there
	closed   chan sealing  // files that are complete, from Run to the sealer
	bequests chan bequest  // from Run to who tells them
	lines    *jsonl.Writer
	amends   *jsonl.Writer
	metrics  *metrics
	recent   *recent

	mu      sync.Mutex // guards live, expects and announced
	live    map[string]struct{}
	expects map[string]chan<- *timeline.Line // who waits for the line of a request
	// announced is set by the first Begin: then a request that is not live has no router any more.
	announced bool

	// What follows is owned by Run.
	open    map[string]*request
	order   queue     // open requests by age, and some that are written
	swept   time.Time // when those were let go
	due     queue     // requests with a deadline, in its order: every deadline is the same time away
	written *ring
	unacked []ack // of lines that are in the writers' memory
	merger  timeline.Merger
	line    []byte // the newest line, in memory that is used again
	failing bool
	amend   []*writtenLine // amendments that could not be written yet
	ending  bool           // the files are being closed
}

// message is one input of Run.
type message struct {
	rec    *phase.Record
	header phase.StepsHeader // of steps
	steps  *infer.Steps
	ack    ack // nil: nobody waits
	// adopted is the router (the token of its name) whose record this is, when that is gone and not this one.
	adopted string
	// back says that there is no record: the router adopted is back, or has another heir. It is closed once nothing of that
	// router's is held here any more.
	back chan<- struct{}
	// inherited is, instead of a record, a line that another router wrote while this one was gone.
	inherited *timeline.Line
	// answer says that there is no record, but a question: whether the request asked has records and no line.
	answer chan<- bool // holds the one that is sent
	asked  string
}

// ack tells the stream that a record is safe, or that it is still wanted.
type ack interface {
	Ack() error
	InProgress() error
}

// New opens the files and remembers what was written lately.
func New(o Options) (*Collector, error) {
	if o.Router == "" || o.Dir == "" {
		return nil, fmt.Errorf("collect timelines: router name %q and traces folder %q must both be given", o.Router, o.Dir)
	}
	setDefaults(&o)
	c := &Collector{
		o: o, log: o.Logger, in: make(chan message, inputs), hurry: make(chan struct{}, 1), live: map[string]struct{}{}, open: map[string]*request{},
		recent: newRecent(o.Recent), written: newRing(rememberLines), closed: make(chan sealing, 64),
		bequests: make(chan bequest, 1024),
	}
	var err error
	if c.lines, err = jsonl.Open(c.fileOptions(".jsonl")); err != nil {
		return nil, err
	}
	if c.amends, err = jsonl.Open(c.fileOptions(".amend.ndjson")); err != nil {
		return nil, err
	}
	if err := c.remember(); err != nil {
		return nil, err
	}
	c.metrics = newMetrics(c)
	if o.Registry != nil {
		if err := c.metrics.register(o.Registry); err != nil {
			return nil, fmt.Errorf("register collector metrics: %w", err)
		}
	}
	return c, nil
}

const (
	inputs        = 4096
	rememberLines = 100_000
)

func setDefaults(o *Options) {
	if o.Grace == 0 {
		o.Grace = 2 * time.Second
	}
	if o.Orphan == 0 {
		o.Orphan = time.Minute
	}
	if o.Flush == 0 {
		o.Flush = 100 * time.Millisecond
	}
	if o.AdoptLook == 0 {
		o.AdoptLook = 3 * time.Second
	}
	if o.MaxOpen == 0 {
		o.MaxOpen = 200_000
	}
	if o.Recent == 0 {
		o.Recent = 1000
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	if o.Strangers == nil {
		o.Strangers = o.Logger
	}
}

func (c *Collector) fileOptions(suffix string) jsonl.Options {
	return jsonl.Options{
		Dir: c.o.Dir, Prefix: filePrefix, Suffix: suffix, MaxBytes: c.o.MaxBytes, MaxLines: maxLines, MaxTotal: c.o.MaxTotal, Sync: c.o.Sync, Logger: c.log,
		Beside: []string{traces.IndexSuffix}, Closed: c.fileClosed,
	}
}

const filePrefix = "timeline"

// maxLines of a file: while it is written its lines are found by the index in memory, two ids a line, and so are those of the file
// before it, which is being sealed.
const maxLines = indexIDs / 4

// Begin announces a request that this router works on: its records wait for the router's own, however long it takes.
func (c *Collector) Begin(requestID string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.live[requestID] = struct{}{}
	c.announced = true
}

// Add takes the router's own record of a request that has ended; call it before the last byte goes to the client. When it
// returns, the record is in the publisher's spool (if there is one) and on its way to the merge.
func (c *Collector) Add(rec *phase.Record) error {
	c.mu.Lock()
	delete(c.live, rec.RequestID)
	c.mu.Unlock()
	var err error
	m := message{rec: rec}
	if c.o.Publisher != nil {
		var held bus.Held
		if held, err = c.o.Publisher.PublishHeld(rec); err == nil {
			m.ack = held // acknowledged when its line is on disk: then it need not travel
		}
	}
	select {
	case c.in <- m:
		if len(c.in) >= gatherMost {
			c.hasten()
		}
	default:
		c.metrics.busy.Inc()
		err = errors.Join(err, ErrBusy)
	}
	return err
}

// isLive says whether the router still works on the request, and whether that can be known.
func (c *Collector) isLive(id string) (live, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, live = c.live[id]
	return live, c.announced
}

// Run consumes until ctx ends, gives the requests that have ended the grace time to become complete, and closes the
// files. Records of requests that have not ended stay in the stream for the next process.
func (c *Collector) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	consuming, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	wg.Go(c.seal)
	defer close(c.closed)
	defer close(c.bequests)
	if c.o.Conn != nil {
		wg.Go(func() { c.tellBequests(consuming) })
		wg.Go(func() { c.consume(consuming) })
		wg.Go(func() { c.adoptDead(consuming) })
	}
	c.loop(ctx.Done(), nil)
	stop := make(chan struct{})
	last := time.AfterFunc(c.o.Grace+2*c.o.Flush, func() { close(stop) })
	defer last.Stop()
	c.loop(stop, func() bool { return len(c.in) == 0 && c.due.empty() })
	return c.finish()
}

// loop handles messages and time until stop closes or, after a tick, enough says so.
func (c *Collector) loop(stop <-chan struct{}, enough func() bool) {
	tick := time.NewTicker(c.o.Flush)
	defer tick.Stop()
	alive := time.NewTicker(keepAlive)
	defer alive.Stop()
	gathered := time.NewTimer(0)
	defer gathered.Stop()
	for {
		select {
		case <-stop:
			return
		case m := <-c.in:
			c.take(m)
			c.takeAll()
			c.gather(gathered)
		case <-tick.C:
			c.expire(time.Now())
			c.retryAmendments()
			c.flush()
			if enough != nil && enough() {
				return
			}
		case <-alive.C:
			c.keepAlive()
		}
	}
}

// gatherTime is how long messages gather while requests come one after another: to take each alone would wake Run for each, and
// cost the request that is about to end its processor.
const gatherTime = 10 * time.Millisecond

// gatherMost records of this router are a batch without waiting longer: a large one would keep a processor from requests.
const gatherMost = 12

// gather lets messages come together, unless somebody waits for a line.
func (c *Collector) gather(t *time.Timer) {
	select {
	case <-c.hurry: // of what was taken; if not, it is seen below
	default:
	}
	c.mu.Lock()
	awaited := len(c.expects) > 0
	c.mu.Unlock()
	if awaited || len(c.in) >= gatherMost {
		return
	}
	t.Reset(gatherTime)
	select {
	case <-t.C:
	case <-c.hurry:
	}
}

// takeAll takes what is in the channel already.
func (c *Collector) takeAll() {
	for {
		select {
		case m := <-c.in:
			c.take(m)
		default:
			return
		}
	}
}

// finish takes what is in the channel already, writes it and closes.
func (c *Collector) finish() error {
	c.takeAll()
	for r := c.order.front(); r != nil; r = c.order.front() {
		c.order.pop()
		// Without a stream nobody would bring the records again: write what there is.
		if c.o.Conn == nil && !r.done && r.router() {
			c.write(r)
		}
	}
	c.flush()
	c.ending = true
	return errors.Join(c.lines.Close(), c.amends.Close())
}
