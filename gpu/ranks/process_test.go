package ranks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/collective"
	"meridian.internal/gpu/engine"
	"meridian.internal/gpu/model"
	"meridian.internal/gpu/remote"
	"meridian.internal/gpu/sim"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/rows"
)

// job is what a test asks of the process of a rank.
type job struct {
	Rank, Ranks int
	CPU         bool // the embedded model on the cpu device, in one stage for even ranks and two for odd ones
	Sim         simJob
	Delay       time.Duration // each step takes up to so much longer
	Engine      engineJob
	Interval    int
	Deadline    time.Duration
	FailAt      string // the device fails once this file is there; "": never
}

// simJob is the part of sim.Config that tests use, and that JSON can say.
type simJob struct {
	Vocab, TokensPerBlock, KVBlocks, MaxSlots int
	Shallow                                   bool
	Cost                                      sim.Cost
}

func (j simJob) config() sim.Config {
	return sim.Config{Vocab: j.Vocab, TokensPerBlock: j.TokensPerBlock, KVBlocks: j.KVBlocks, MaxSlots: j.MaxSlots, Shallow: j.Shallow, Cost: j.Cost}
}

type engineJob struct {
	Overlap, PrefixReuse                   bool
	MaxNumTokens, MaxBatchSize, MaxWaiting int
}

func (j engineJob) config() engine.Config {
	return engine.Config{Overlap: j.Overlap, PrefixReuse: j.PrefixReuse, MaxNumTokens: j.MaxNumTokens, MaxBatchSize: j.MaxBatchSize, MaxWaiting: j.MaxWaiting}
}

const jobVariable = "MERIDIAN_TEST_RANK"

// TestMain makes this program the process of a rank when a test has started it as that.
func TestMain(m *testing.M) {
	text := os.Getenv(jobVariable)
	if text == "" {
		os.Exit(m.Run())
	}
	var j job
	err := json.Unmarshal([]byte(text), &j)
	if err == nil {
		err = j.serve()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "rank:", err)
		os.Exit(1)
	}
}

// clockStart makes the clocks of this test's processes differ.
var clockStart = time.Now()

func testNow() int64 { return int64(time.Since(clockStart)) + 1 }

func (j *job) backend() (backend.Backend, error) {
	if j.CPU {
		m, err := model.Load("")
		if err != nil {
			return nil, err
		}
		return cpuDevice(m, 1+j.Rank%2, testNow)
	}
	c := j.Sim.config()
	c.Now = testNow
	random := rand.New(rand.NewPCG(uint64(j.Rank), 5))
	if j.Delay > 0 {
		c.Sleep = func(d time.Duration) { time.Sleep(d + time.Duration(random.Int64N(int64(j.Delay)))) }
	}
	if j.FailAt != "" {
		c.Fail = func(int64) error {
			if _, err := os.Stat(j.FailAt); err != nil {
				return nil //nolint:nilerr // it is not there yet
			}
			return errors.New("the device fell off")
		}
	}
	return sim.New(c)
}

func (j *job) options() Options {
	o := Options{Engine: j.Engine.config(), Deadline: j.Deadline, Sink: rows.Sink{Interval: j.Interval, KVInterval: j.Interval}}
	o.Engine.Now, o.Engine.Logger = testNow, slog.New(slog.NewTextHandler(os.Stderr, nil))
	return o
}

func (j *job) serve() error {
	signal.Ignore(syscall.SIGTERM, syscall.SIGINT)
	links, err := remote.Inherited()
	if err != nil {
		return err
	}
	b, err := j.backend()
	if err != nil {
		return err
	}
	o := ServeOptions{Options: j.options(), Rank: j.Rank, Ranks: j.Ranks, Links: links}
	o.Backends = []backend.Backend{b}
	return errors.Join(Serve(context.Background(), o), b.Close())
}

// newProcesses makes a group whose ranks but the first are processes. one changes what a rank is asked for.
func newProcesses(t testing.TB, j job, one func(*job)) *rig {
	t.Helper()
	if j.Deadline == 0 {
		j.Deadline = 20 * time.Second
	}
	var begun []*remote.Process
	for rank := 1; rank < j.Ranks; rank++ {
		mine := j
		mine.Rank = rank
		if one != nil {
			one(&mine)
		}
		text, err := json.Marshal(mine)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), jobVariable+"="+string(text))
		p, err := remote.Start(rank, cmd)
		if err != nil {
			t.Fatal(err)
		}
		begun = append(begun, p)
	}
	r := &rig{t: t}
	o := j.options()
	o.Sink.Put = func(row *rows.Row) { r.rows = append(r.rows, *row) }
	b, err := j.backend()
	if err != nil {
		t.Fatal(err)
	}
	o.Backends = []backend.Backend{b}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for i, p := range begun {
		e, err := remote.Open(ctx, p, remote.Options{Rank: i + 1, Deadline: j.Deadline, Now: testNow, Logger: o.Engine.Logger})
		if err != nil {
			t.Fatal(err)
		}
		o.Remotes = append(o.Remotes, e)
	}
	return r.start(o)
}

var smallJob = simJob{Vocab: small.Vocab, TokensPerBlock: small.TokensPerBlock, KVBlocks: small.KVBlocks, MaxSlots: small.MaxSlots}

func TestTextsOfProcessesAreThoseOfOneRank(t *testing.T) {
	list := requests(rand.New(rand.NewPCG(2, 1)), 80, small.Vocab)
	want := texts(t, list, small)
	j := job{Ranks: 3, Sim: smallJob, Engine: engineJob{Overlap: true, PrefixReuse: true, MaxNumTokens: 40}, Interval: 1}
	j.Sim.Cost = sim.Cost{Step: 50_000, PrefillToken: 1000, Decode: 2000}
	r := newProcesses(t, j, nil)
	used := map[int]int{}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i, req := range list {
		wg.Go(func() {
			time.Sleep(time.Duration(i%20) * time.Millisecond)
			s, err := r.Submit(req)
			if err != nil {
				t.Error(err)
				return
			}
			got, done, err := finish(s)
			if err != nil || !slices.Equal(got, want[i]) || done.Report.Rank == nil || *done.Report.Rank != s.Rank() || done.Report.QueuedNS == 0 || done.Report.FirstScheduledNS == 0 {
				t.Errorf("request %d on rank %d: %v, %+v, want %v, error %v", i, s.Rank(), got, done, want[i], err)
			}
			mu.Lock()
			used[s.Rank()]++
			mu.Unlock()
		})
	}
	wg.Wait()
	r.stop()
	if len(used) != 3 {
		t.Errorf("%d ranks ran something, want 3: %v", len(used), used)
	}
	checkSets(t, r.rows, 3, 1)
}

func TestKVIsHandedOverBetweenProcesses(t *testing.T) {
	list := requests(rand.New(rand.NewPCG(3, 3)), 24, small.Vocab)
	for i := range list {
		list[i].MaxTokens += 2
	}
	want := texts(t, list, small)
	j := job{Ranks: 3, Sim: smallJob, Engine: engineJob{Overlap: true, PrefixReuse: true, MaxNumTokens: 40}, Interval: 1}
	j.Sim.Cost = sim.Cost{Step: 50_000, PrefillToken: 1000, Decode: 2000, CopyByte: 1}
	ctx, gen := newProcesses(t, j, nil), newProcesses(t, j, nil)
	var wg sync.WaitGroup
	for i, req := range list {
		wg.Go(func() {
			got, _, err := handOver(ctx, gen, req)
			if err != nil || !slices.Equal(got, want[i]) {
				t.Errorf("request %d: %v, want %v, error %v", i, got, want[i], err)
			}
		})
	}
	wg.Wait()
	prompt := list[0].Prompt
	for len(prompt) < 40 {
		prompt = append(prompt, prompt...)
	}
	for range 3 { // each rank has it
		if _, _, err := run(ctx, infer.Request{ID: 1000, Prompt: prompt, MaxTokens: 1}); err != nil {
			t.Fatal(err)
		}
	}
	lent := 0
	for _, k := range ctx.ranks {
		if x := k.Lend(prompt); x != nil {
			lent = max(lent, x.Tokens())
			if span, err := x.NextSpan(t.Context()); err != nil || span.TokenTo != x.Tokens() {
				t.Errorf("lent %+v, %v", span, err)
			}
			x.Release()
		}
	}
	if lent != len(prompt)/8*8 {
		t.Errorf("%d tokens were lent of a prompt of %d", lent, len(prompt))
	}
	ctx.stop()
	gen.stop()
}

// TestEveryRowSetOfProcessesIsCompleteAndExact is the test of the same name with processes, in real time: random loads, random delays of
// ranks and cancels. It has a fifth of the iterations, or all of them where MERIDIAN_RANKS_FOR asks for long tests.
func TestEveryRowSetOfProcessesIsCompleteAndExact(t *testing.T) {
	iters := int64(iterations)
	if os.Getenv("MERIDIAN_RANKS_FOR") == "" {
		iters /= 5
	}
	for _, interval := range []int{1, 3, 10} {
		t.Run(fmt.Sprint("interval ", interval), func(t *testing.T) {
			seed := rand.New(rand.NewPCG(uint64(interval), 9))
			j := job{
				Ranks: 4, Sim: smallJob, Delay: 50 * time.Microsecond, Interval: interval,
				Engine: engineJob{Overlap: interval != 3, PrefixReuse: true, MaxNumTokens: 64},
			}
			j.Sim.Shallow, j.Sim.Cost = true, sim.Cost{Step: 20_000, PrefillToken: 50, Decode: 100}
			r := newProcesses(t, j, nil)
			list := requests(seed, 60, small.Vocab)
			var l generator
			var wg sync.WaitGroup
			for range 10 {
				random := rand.New(rand.NewPCG(seed.Uint64(), 2))
				wg.Go(func() { l.run(t, r, random, list, func() bool { return r.Load().Iter >= iters }) })
			}
			wg.Wait()
			r.stop()
			checkSets(t, r.rows, 4, interval)
			checkSums(t, r.rows, &l)
			if n := r.aligner.Dropped(); n != 0 {
				t.Errorf("%d rows were dropped", n)
			}
		})
	}
}

// busy makes all ranks work, with some requests each.
func busy(t *testing.T, r *rig) []Sequence {
	t.Helper()
	var open []Sequence
	for i := range 4 * len(r.ranks) {
		s, err := r.Submit(infer.Request{ID: int64(i), Prompt: []int32{1, 2, 3}, MaxTokens: 5000, IgnoreEOS: true})
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
		open = append(open, s)
	}
	return open
}

// hurt makes a group of three processes work, does something to that of rank 2, and gives how the requests of each rank ended.
func hurt(t *testing.T, deadline time.Duration, do func(pid int)) (ends map[int][]infer.Done, r *rig) {
	t.Helper()
	j := job{Ranks: 3, Sim: smallJob, Deadline: deadline, Interval: 1}
	j.Sim.KVBlocks, j.Sim.Cost, j.Sim.Shallow = 100_000, sim.Cost{Step: 1e6}, true
	r = newProcesses(t, j, nil)
	open := busy(t, r)
	do(r.remotes[1].Process().PID())
	ends = map[int][]infer.Done{}
	for _, s := range open {
		_, done, err := finish(s)
		if err != nil {
			t.Fatal(err)
		}
		ends[s.Rank()] = append(ends[s.Rank()], done)
	}
	return ends, r
}

// checkNamed verifies that the requests of all ranks ended with an error that has the texts.
func checkNamed(t *testing.T, ends map[int][]infer.Done, texts ...string) {
	t.Helper()
	for rank := range 3 {
		if len(ends[rank]) == 0 {
			t.Errorf("rank %d ran nothing", rank)
		}
		for _, d := range ends[rank] {
			if d.Reason != infer.FinishFailed || !errors.Is(d.Err, engine.ErrStopped) || d.Report.Rank == nil || *d.Report.Rank != rank || d.Report.QueuedNS == 0 {
				t.Errorf("a request of rank %d ended with %+v", rank, d)
				return
			}
			for _, text := range texts {
				if !strings.Contains(d.Err.Error(), text) {
					t.Errorf("a request of rank %d ended with %q, which does not say %q", rank, d.Err, text)
				}
			}
		}
	}
}

// checkEnded verifies that no process is left.
func checkEnded(t *testing.T, r *rig) {
	t.Helper()
	for _, e := range r.remotes {
		if err := syscall.Kill(e.Process().PID(), 0); !errors.Is(err, syscall.ESRCH) {
			t.Errorf("the process of rank %d: %v, want that there is none", e.Rank(), err)
		}
	}
}

// TestAKilledProcessIsNamedAtOnce: long before any deadline.
func TestAKilledProcessIsNamedAtOnce(t *testing.T) {
	var killed time.Time
	ends, r := hurt(t, time.Hour, func(pid int) {
		killed = time.Now()
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	})
	t.Logf("all requests had ended after %v", time.Since(killed))
	checkNamed(t, ends, "rank 2", "signal: killed")
	r.runs = collective.ErrLost
	r.stop()
	checkEnded(t, r)
}

func TestAProcessThatHangsIsNamedWithinTheDeadline(t *testing.T) {
	const deadline = 3 * time.Second // also of the others, which may wait for a processor
	var stopped time.Time
	ends, r := hurt(t, deadline, func(pid int) {
		stopped = time.Now()
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	})
	t.Logf("all requests had ended after %v, with a deadline of %v", time.Since(stopped), deadline)
	checkNamed(t, ends, "[2]", collective.ErrMissed.Error())
	r.runs = collective.ErrMissed
	r.stop()
	checkEnded(t, r)
}

// TestAProcessThatComesBackInTimeIsNoLoss: nothing is missing, and the sets are complete.
func TestAProcessThatComesBackInTimeIsNoLoss(t *testing.T) {
	j := job{Ranks: 2, Sim: smallJob, Deadline: time.Minute, Interval: 1}
	r := newProcesses(t, j, nil)
	pid := r.remotes[0].Process().PID()
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if _, done, err := run(r, infer.Request{ID: int64(i), Prompt: []int32{1, 2, 3}, MaxTokens: 50, IgnoreEOS: true}); err != nil || done.Err != nil {
				t.Errorf("request %d: %v, %v", i, done.Err, err)
			}
		})
	}
	for range 5 {
		_ = syscall.Kill(pid, syscall.SIGSTOP)
		time.Sleep(20 * time.Millisecond)
		_ = syscall.Kill(pid, syscall.SIGCONT)
		time.Sleep(time.Millisecond)
	}
	wg.Wait()
	r.stop()
	checkSets(t, r.rows, 2, 1)
	checkEnded(t, r)
}

// TestAProcessThatHangsIsMissedAlsoWhenNothingRuns: no round waits for it.
func TestAProcessThatHangsIsMissedAlsoWhenNothingRuns(t *testing.T) {
	r := newProcesses(t, job{Ranks: 2, Sim: smallJob, Deadline: 2 * time.Second, Interval: 1}, nil)
	if err := syscall.Kill(r.remotes[0].Process().PID(), syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := <-r.ended; !errors.Is(err, remote.ErrGone) || !strings.Contains(err.Error(), "rank 1: nothing was heard") {
		t.Errorf("the group ended with %v", err)
	}
	r.ended <- nil
	r.stop()
	checkEnded(t, r)
}

func TestALostDeviceOfAProcessIsNamed(t *testing.T) {
	j := job{Ranks: 3, Sim: smallJob, Engine: engineJob{MaxBatchSize: 1}, Interval: 1}
	j.Sim.KVBlocks, j.Sim.Cost, j.Sim.Shallow = 100_000, sim.Cost{Step: 1e6}, true
	fell := filepath.Join(t.TempDir(), "fell")
	r := newProcesses(t, j, func(j *job) {
		if j.Rank == 2 {
			j.FailAt = fell
		}
	})
	var open []Sequence
	for i := range 12 {
		s, err := r.Submit(infer.Request{ID: int64(i), Prompt: []int32{1, 2, 3}, MaxTokens: 5000, IgnoreEOS: true})
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, s)
	}
	if err := os.WriteFile(fell, nil, 0o600); err != nil { // all have their ranks now
		t.Fatal(err)
	}
	checkTold(t, open, 2, func(err error) bool { return strings.Contains(err.Error(), "the device fell off") })
	r.runs = collective.ErrLost
	r.stop()
	checkEnded(t, r)
}

// TestAPrefixIsFoundOnItsProcess: what a rank stores is known by the time that its answer is.
func TestAPrefixIsFoundOnItsProcess(t *testing.T) {
	r := newProcesses(t, job{Ranks: 4, Sim: smallJob, Engine: engineJob{PrefixReuse: true}, Interval: 1}, nil)
	checkPrefixesAreFound(t, r)
	r.Drain()
	<-r.Drained()
	if n := r.LeakedBlocks(); n != 0 {
		t.Errorf("%d blocks leaked", n)
	}
	r.stop()
}

// TestProcessesLeaveNothingOpen: no descriptor of this process stays.
func TestProcessesLeaveNothingOpen(t *testing.T) {
	count := func() int {
		list, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("no /proc here: ", err)
		}
		return len(list)
	}
	round := func() {
		r := newProcesses(t, job{Ranks: 3, Sim: smallJob, Interval: 1}, nil)
		if _, _, err := run(r, infer.Request{ID: 1, Prompt: []int32{1, 2, 3}, MaxTokens: 5}); err != nil {
			t.Fatal(err)
		}
		r.stop()
		checkEnded(t, r)
	}
	round() // the first opens what stays
	before := count()
	round()
	for end := time.Now().Add(time.Minute); count() > before; time.Sleep(time.Millisecond) { // goroutines that end close theirs
		if time.Now().After(end) {
			t.Fatalf("%d descriptors, %d before", count(), before)
		}
	}
}
