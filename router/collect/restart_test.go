package collect

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/phase"
)

// afterRestart lets the first and then the second use a collector of the same folder, and gives the lines that they wrote.
func afterRestart(t *testing.T, first, second func(c *Collector)) []*timeline.Line {
	t.Helper()
	dir := t.TempDir()
	for _, use := range []func(c *Collector){first, second} {
		c, stop := start(t, Options{Dir: dir})
		use(c)
		time.Sleep(5 * time.Second)
		stop()
		// The files of lines are written last, as they are while requests come.
		for pattern, at := range map[string]time.Time{"timeline-*.amend.ndjson": time.Now().Add(-time.Minute), "timeline-*.jsonl": time.Now()} {
			names, _ := jsonl.Glob(dir, pattern)
			for _, n := range names {
				if err := os.Chtimes(n, at, at); err != nil {
					t.Fatal(err)
				}
			}
		}
		time.Sleep(2 * time.Second) // the next files have other names
	}
	return readDir(dir)
}

func newest(lines []*timeline.Line) *timeline.Line { return lines[len(lines)-1] }

// What an amendment holds is not forgotten for the older line in the file that was written last.
func TestARestartKeepsAmendments(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lines := afterRestart(t, func(c *Collector) {
			c.Begin("a")
			_ = c.Add(rec(phase.Disagg, "a"))
			time.Sleep(5 * time.Second) // grace is over: a is written without both
			c.in <- message{rec: rec(phase.Ctx, "a")}
		}, func(c *Collector) {
			raw, _ := c.Find("a")
			if l, err := timeline.Parse(raw); err != nil || len(l.Missing) != 1 {
				t.Errorf("after the restart the line is %s, %v; want gen alone to be missing", raw, err)
			}
			c.in <- message{rec: rec(phase.Gen, "a")}
		})
		if l := newest(lines); !l.Complete {
			t.Errorf("all three records came; the newest amendment lacks %q", l.Missing)
		}
	})
}

// aStep is a message with one step of the generation record of a.
func aStep() message {
	s := &infer.Steps{}
	s.Step, s.Iter, s.KVTokens, s.BatchSize = []int32{1}, []int64{5}, []int32{9}, []int32{1}
	s.ForwardStartNS, s.ForwardEndNS, s.SampleEndNS, s.TokenNS = []int64{1011e6}, []int64{1012e6}, []int64{1013e6}, []int64{1014e6}
	return message{header: phase.StepsHeader{Role: phase.Gen, Node: "gen0", RequestID: "a", Parts: 1}, steps: s}
}

func withSteps() *phase.Record {
	r := rec(phase.Gen, "a")
	r.StepMessages = 1
	return r
}

// steps of a line, as "iter start".
func steps(l *timeline.Line) (out []string) {
	for _, p := range l.Phases {
		start := p.Steps.Column("forward_start_ns")
		for i, iter := range p.Steps.Column("iter") {
			out = append(out, fmt.Sprint(iter, " ", start[i]))
		}
	}
	return out
}

// Steps that come after a restart complete the line that lacked them; those that were there stay when a record completes it.
func TestStepsAndARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := func(c *Collector, more ...message) {
			c.Begin("a")
			c.in <- message{rec: withSteps()}
			for _, m := range more {
				c.in <- m
			}
			_ = c.Add(rec(phase.Disagg, "a"))
		}
		undisturbed := newest(afterRestart(t, func(c *Collector) { begin(c, aStep(), message{rec: rec(phase.Ctx, "a")}) }, func(*Collector) {}))
		late := newest(afterRestart(t, func(c *Collector) { begin(c, message{rec: rec(phase.Ctx, "a")}) }, func(c *Collector) { c.in <- aStep() }))
		kept := newest(afterRestart(t, func(c *Collector) { begin(c, aStep()) }, func(c *Collector) { c.in <- message{rec: rec(phase.Ctx, "a")} }))
		for name, l := range map[string]*timeline.Line{"undisturbed": undisturbed, "the steps come late": late, "a record comes late": kept} {
			if got, want := fmt.Sprint(steps(l)), fmt.Sprint(steps(undisturbed)); !l.Complete || got != want || got == "[]" {
				t.Errorf("%s: steps %s, missing %q; want %s", name, got, l.Missing, want)
			}
		}
	})
}

// A stamp that no clock shows harms neither who reads its line, nor the start of the next process.
func TestTheLeastOfAllStamps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lines := afterRestart(t, func(c *Collector) {
			r, err := phase.Parse([]byte(`{"schema":"meridian.phase/1","role":"disagg","node":"x","instance":"00000000000000aa.00000001","request_id":"p","outcome":"finished",` +
				`"clocks":[{"id":"00000000000000aa.00000001"}],"stamps":{"clock":0,"receive_ns":5,"parsed_ns":-9223372036854775808,"end_ns":7}}`))
			if err != nil {
				t.Fatal(err)
			}
			c.in <- message{rec: r}
		}, func(*Collector) {})
		if len(lines) != 1 {
			t.Errorf("%d lines", len(lines))
		}
	})
}

// A copy of a record of a router that is gone is not acknowledged before that router is told of the line.
func TestACopyOfAnAdoptedRecordWaitsForItsBequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		c, stop := start(t, Options{Dir: dir})
		defer stop()
		first, again := &fakeAck{dir: dir}, &fakeAck{dir: dir}
		c.in <- message{rec: rec(phase.Ctx, "a"), adopted: "r1"}
		c.in <- message{rec: rec(phase.Gen, "a"), adopted: "r1"}
		c.in <- message{rec: rec(phase.Disagg, "a"), adopted: "r1", ack: first}
		time.Sleep(time.Second) // nobody tells bequests here
		c.in <- message{rec: rec(phase.Disagg, "a"), adopted: "r1", ack: again}
		time.Sleep(time.Second)
		if first.seen()+again.seen() != 0 {
			t.Errorf("acknowledged before r1 is told: the first %d times, the copy %d", first.seen(), again.seen())
		}
	})
}

// The line of a request with a long id holds up no bequest after it.
func TestABequestOfALongID(t *testing.T) {
	ctx, conn := stream(t)
	c := &Collector{o: Options{Conn: conn, Logger: quiet}, log: quiet, bequests: make(chan bequest, 4)}
	c.metrics = newMetrics(c)
	told := make(chan struct{})
	c.bequests <- c.bequeath("gone", &timeline.Line{RequestID: strings.Repeat("x", 5000)}, nil)[0].(bequest)
	c.bequests <- bequest{key: "gone.short", line: []byte("{}"), done: told}
	run, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan struct{})
	go func() { defer close(ended); c.tellBequests(run) }()
	select {
	case <-told:
	case <-time.After(time.Minute):
		t.Error("the next bequest waits")
	}
	stop()
	close(c.bequests)
	<-ended
}

// A header that claims many parts holds no memory for them.
func TestPartsThatAreClaimedCostNothing(t *testing.T) {
	r := &request{}
	k := timeline.Key{Role: phase.Gen, Node: "g"}
	r.addSteps(k, phase.StepsHeader{Parts: 1 << 30, Part: 1 << 29}, &infer.Steps{})
	r.addSteps(k, phase.StepsHeader{Parts: 1 << 30, Part: 3}, &infer.Steps{})
	if sp := r.steps[k]; len(sp.parts) != 1 {
		t.Errorf("%d parts are kept, want the one that can be", len(sp.parts))
	}
}

// Every line of the newest file is found by the index in memory, and no file has more lines than that has room for.
func TestAFileEndsBeforeItsLinesLeaveTheIndex(t *testing.T) {
	c, stop := start(t, Options{Dir: t.TempDir()})
	defer stop()
	for i := range maxLines + 2 {
		r := rec(phase.Disagg, fmt.Sprint("r", i))
		r.Decision = nil
		c.in <- message{rec: r}
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, ok := c.Find(fmt.Sprint("r", maxLines+1)); ok {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the last line is not found")
		}
	}
	if files, _ := filepath.Glob(filepath.Join(c.o.Dir, "timeline-*.jsonl")); len(files) != 2 {
		t.Errorf("%d files of lines, want 2", len(files))
	}
	for _, id := range []string{"r0", fmt.Sprint("r", maxLines-1), fmt.Sprint("client-r", maxLines)} {
		if _, ok := c.Find(id); !ok {
			t.Errorf("%s is not found", id)
		}
	}
}
