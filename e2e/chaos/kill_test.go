package chaos

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/clustertest"
	"meridian.internal/shared/bus"
	"meridian.internal/shared/serve/servetest"
)

// The short form runs with every test; make chaos sets these.
const (
	envSeeds    = "MERIDIAN_CHAOS_SEEDS"    // how many seeds, from 1
	envRequests = "MERIDIAN_CHAOS_REQUESTS" // of each seed
	envNATS     = "MERIDIAN_CHAOS_NATS"     // "address folder": this process is the NATS server
)

// TestMain lets the test binary be a NATS server: one that can be killed needs a process of its own.
func TestMain(m *testing.M) {
	if text := os.Getenv(envNATS); text != "" {
		listen, dir, _ := strings.Cut(text, " ")
		e, err := bus.StartEmbedded(bus.EmbeddedOptions{Listen: listen, StoreDir: dir, Logger: quiet})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(e.Addr())
		end := make(chan os.Signal, 1)
		signal.Notify(end, syscall.SIGTERM)
		<-end
		e.Close()
		return
	}
	os.Exit(m.Run())
}

// natsProcess is a NATS server in a process of its own.
type natsProcess struct {
	addr, dir string
	cmd       *exec.Cmd
}

func startNATS(ctx context.Context, addr, dir string) (*natsProcess, error) {
	p := &natsProcess{dir: dir, cmd: exec.CommandContext(ctx, os.Args[0])}
	p.cmd.Env = append(os.Environ(), envNATS+"="+addr+" "+dir)
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("NATS server at %s did not start: %w", addr, errors.Join(err, p.kill()))
	}
	p.addr = strings.TrimSpace(line)
	return p, nil
}

func (p *natsProcess) kill() error {
	if err := p.cmd.Process.Kill(); err != nil {
		return err
	}
	_ = p.cmd.Wait() // its end by a signal is what was asked for
	return nil
}

func number(t *testing.T, env string, without int) int {
	t.Helper()
	text := os.Getenv(env)
	if text == "" {
		return without
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%q: want a number of 1 or more", env, text)
	}
	return n
}

func TestWhateverIsKilledEveryRequestThatEndedHasOneLine(t *testing.T) {
	requests := number(t, envRequests, 800)
	for seed := range number(t, envSeeds, 1) {
		t.Run(fmt.Sprintf("seed %d", seed+1), func(t *testing.T) { killAtRandom(t, uint64(seed+1), requests) })
	}
}

// killAtRandom sends requests while router, NATS and nodes are killed, one a time, and come back.
func killAtRandom(t *testing.T, seed uint64, requests int) {
	limit := 3*time.Minute + time.Duration(requests)*100*time.Millisecond
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	nats, err := startNATS(ctx, servetest.Addr(t), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = nats.kill() }()
	r := startFor(t, cluster.Config{
		Ctx: 2, Gen: 2, NATS: "nats://" + nats.addr, NodeArgs: []string{"--sim-step=500us", "--sim-prefill-token=1us", "--sim-decode=1us", "--sim-shallow"},
	}, limit)
	load := newKillLoad(r, seed)
	done := make(chan struct{})
	go func() { load.run(requests); close(done) }()
	kills := map[string]int{}
	rng := rand.New(rand.NewPCG(seed, 1))
	targets := []*cluster.Process{nil, r.Routers[0], r.Find("ctx0"), r.Find("ctx1"), r.Find("gen0"), r.Find("gen1")}
	for running := true; running; {
		select {
		case <-done:
			running = false
			continue
		case <-time.After(time.Duration(150+rng.IntN(700)) * time.Millisecond):
		}
		pause := time.Duration(rng.IntN(400)) * time.Millisecond
		p := targets[rng.IntN(len(targets))]
		if p == nil {
			kills["nats"]++
			if err := nats.kill(); err != nil {
				t.Fatal(err)
			}
			r.pause(pause)
			if nats, err = startNATS(ctx, nats.addr, nats.dir); err != nil {
				t.Fatal(err)
			}
			continue
		}
		kills[p.Name]++
		if err := p.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		ended(t, p)
		r.pause(pause)
		if err := r.Restart(r.ctx, p); err != nil {
			t.Fatalf("restart %s: %v", p.Name, err)
		}
	}
	t.Logf("seed %d: %d requests, %d answered, %d ended with an error of the router, %d cut; killed %v", seed, requests, load.answered.Load(), load.refused.Load(), load.cut.Load(), kills)
	load.check(t)
}

// killLoad remembers which requests a client saw end.
type killLoad struct {
	r                      *rig
	seed                   uint64
	answered, refused, cut atomic.Int64
	mu                     sync.Mutex // guards ended
	ended                  map[string]bool
}

func newKillLoad(r *rig, seed uint64) *killLoad {
	return &killLoad{r: r, seed: seed, ended: map[string]bool{}}
}

func (l *killLoad) run(requests int) {
	const streams = 32
	var next atomic.Int64
	var all sync.WaitGroup
	for range streams {
		all.Go(func() {
			for {
				i := int(next.Add(1))
				if i > requests || l.r.ctx.Err() != nil {
					return
				}
				id := fmt.Sprintf("kill-%d-%d", l.seed, i)
				_, err := l.r.client.Do(l.r.ctx, client.Request{ID: id, Fields: fields(5+i%60, 1+i%8)})
				if l.note(id, err); err != nil {
					l.waitForRouter()
				}
			}
		})
	}
	all.Wait()
}

// waitForRouter returns when the router answers again: meanwhile its port refuses at once.
func (l *killLoad) waitForRouter() {
	var view struct{}
	for l.r.ctx.Err() == nil && l.r.client.Get(l.r.ctx, "/cluster", &view) != nil {
		l.r.pause(50 * time.Millisecond)
	}
}

// note decides whether the client saw the request end: with an answer, or with an error that the router gave. A body that the
// router refused before it became a request has no timeline.
func (l *killLoad) note(id string, err error) {
	var status *client.StatusError
	switch {
	case err == nil:
		l.answered.Add(1)
	case errors.As(err, &status) && status.Type != "unparsable" && status.Stage != "parse" && status.Status != 404:
		l.refused.Add(1)
	default:
		l.cut.Add(1)
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended[id] = true
}

// check waits until every request that ended has a line, and wants one line of each request.
func (l *killLoad) check(t *testing.T) {
	t.Helper()
	var lines map[string]int
	l.r.poll(t, 2*patience, "not every request that ended has its line", func() bool {
		lines = l.lines(t)
		for id := range l.ended {
			if lines[id] == 0 {
				return false
			}
		}
		return true
	})
	for id, n := range lines {
		if n > 1 {
			t.Errorf("request %s has %d lines", id, n)
		}
	}
	if out, err := exec.Command(filepath.Join(clustertest.Binaries(t), "timeline"), "check", l.r.Traces()).CombinedOutput(); err != nil {
		t.Errorf("timeline check: %v\n%s%s", err, out, named(out))
	}
}

// named are the lines that timeline check names as FILE:NUMBER.
func named(out []byte) (text string) {
	for s := range strings.Lines(string(out)) {
		at := strings.SplitN(s, ":", 3)
		if len(at) < 3 {
			continue
		}
		b, _ := os.ReadFile(at[0]) // what is no name of a file has no line either
		n, _ := strconv.Atoi(at[1])
		if lines := strings.SplitAfter(string(b), "\n"); n > 0 && n <= len(lines) {
			text += lines[n-1]
		}
	}
	return text
}

// lines counts the lines of each request in the files.
func (l *killLoad) lines(t *testing.T) map[string]int {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(l.r.Traces(), "timeline-*.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]int{}
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			var x struct {
				ID string `json:"client_request_id"`
			}
			if json.Unmarshal([]byte(line), &x) == nil { // the open file's last line may be torn
				out[x.ID]++
			}
		}
	}
	return out
}
