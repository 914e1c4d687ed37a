package ranks

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
)

// processes are the flags of a node whose ranks are processes.
func processes(ranks int, more ...string) cluster.Place {
	return shape{ranks, 1}.flags(append(more, "--rank-processes")...)
}

// children are the ids of the processes that a process has begun.
func children(t *testing.T, pid int) (list []int) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil || len(files) == 0 {
		t.Skip("children of a process cannot be found here")
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // a thread that has ended
		}
		for word := range strings.FieldsSeq(string(b)) {
			if n, err := strconv.Atoi(word); err == nil {
				list = append(list, n)
			}
		}
	}
	return list
}

// gone waits until none of the processes is left.
func (r *rig) gone(t *testing.T, pids []int) {
	t.Helper()
	for _, pid := range pids {
		for !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
			if r.ctx.Err() != nil {
				t.Fatalf("process %d is left", pid)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// TestTextsOfProcessesAreThoseOfOneDevice, and their clocks and rows are seen.
func TestTextsOfProcessesAreThoseOfOneDevice(t *testing.T) {
	one := shape{1, 1}
	want := start(t, map[string]cluster.Place{"ctx0": one.flags(), "gen0": one.flags()}).texts(t)
	r := start(t, map[string]cluster.Place{"ctx0": processes(2), "gen0": processes(3)})
	r.gives(t, want)
	ranks := append(children(t, r.Find("ctx0").PID()), children(t, r.Find("gen0").PID())...)
	if len(ranks) != 3 {
		t.Errorf("the nodes have %d rank processes, want 1 and 2", len(ranks))
	}
	proven := 0
	for i := range cases {
		var line struct {
			Phases []struct {
				DPRank *int  `json:"dp_rank"`
				Rank   []any `json:"rank_clock"`
			}
		}
		if err := r.client.Get(r.ctx, fmt.Sprint("/timelines/r0-", i), &line); err != nil {
			t.Fatal(err)
		}
		for _, p := range line.Phases {
			if own := p.DPRank != nil && *p.DPRank > 0; own != (p.Rank != nil) {
				t.Errorf("case %d: rank %v with the clock %v", i, p.DPRank, p.Rank)
			} else if own && p.Rank[1] == "identity" && p.Rank[2].(float64) > 0 && p.Rank[3] == 0.0 {
				proven++
			}
		}
	}
	if proven == 0 {
		t.Error("no rank was proven to read its node's clock")
	}
	if rows := r.body(t, r.Find("gen0").URL+"/iteration_stats?after=0&limit=3"); strings.Count(rows, `"rank_clock_id":"`) != 2 || strings.Count(rows, `"rank_clock_id":null`) != 1 {
		t.Errorf("the first rows name the clocks of other ranks than 1 and 2: %.400s", rows)
	}
	for _, p := range r.Nodes {
		if err := p.Terminate(15 * time.Second); err != nil {
			t.Error(err)
		}
	}
	r.gone(t, ranks)
}

// long sends a request for each rank of gen0 and returns when all have begun; the ends come by the channel.
func (r *rig) long(t *testing.T, n int) <-chan error {
	t.Helper()
	ends, begun := make(chan error, n), make(chan struct{}, n)
	for i := range n {
		var once sync.Once
		go func() {
			_, err := r.client.Do(r.ctx, client.Request{ID: fmt.Sprint("long-", i), OnText: func(string) { once.Do(func() { begun <- struct{}{} }) }, Fields: map[string]any{
				"model": "meridian-tiny", "prompt": []int{10 + i, 11, 12}, "max_tokens": 1900, "temperature": 0, "stream": true, "ignore_eos": true,
			}})
			ends <- err
		}()
	}
	for range n {
		select {
		case <-begun:
		case <-r.ctx.Done():
			t.Fatal("requests did not begin")
		}
	}
	return ends
}

// unready waits until the router gives a node no more work.
func (r *rig) unready(t *testing.T, name string) {
	t.Helper()
	for {
		var view struct {
			Nodes []struct{ Name, State string }
		}
		if err := r.client.Get(r.ctx, "/cluster", &view); err != nil {
			t.Fatal(err)
		}
		ready := false
		for _, n := range view.Nodes {
			ready = ready || n.Name == name && n.State == "ready"
		}
		if !ready {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// TestASignalToARankIsSeenAsWhatItIs: the node names the rank, its requests end with records, it leaves and no process stays.
func TestASignalToARankIsSeenAsWhatItIs(t *testing.T) {
	for _, c := range []struct {
		name   string
		signal syscall.Signal
		says   string // of the node's log
	}{
		{"killed", syscall.SIGKILL, "signal: killed"},
		{"stopped", syscall.SIGSTOP, "rank missed the deadline"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := start(t, map[string]cluster.Place{"gen0": processes(2, "--rank-deadline=3s")})
			gen := r.Find("gen0")
			ranks := children(t, gen.PID())
			if len(ranks) != 1 {
				t.Fatalf("gen0 has the rank processes %v, want one", ranks)
			}
			ends := r.long(t, 4)
			at := time.Now()
			if err := syscall.Kill(ranks[0], c.signal); err != nil {
				t.Fatal(err)
			}
			r.unready(t, "gen0")
			t.Logf("the router knew %v after the signal", time.Since(at))
			for range 4 {
				<-ends
			}
			if err := gen.Wait(r.ctx); r.ctx.Err() != nil {
				t.Fatalf("gen0 goes on: %v", err)
			}
			if log := gen.LogTail(20); !strings.Contains(log, c.says) || !strings.Contains(log, "rank 1") && !strings.Contains(log, "[1]") {
				t.Errorf("gen0 said %s", log)
			}
			r.gone(t, ranks)
			for i := range 4 {
				l := r.written(t, fmt.Sprint("long-", i))
				if len(l.Attempts) == 0 || l.Attempts[0].Error == nil || !strings.Contains(l.Attempts[0].Error.Message, c.says) {
					t.Errorf("request %d has the attempts %+v", i, l.Attempts)
				}
			}
		})
	}
}

// attempts is the part of a line that says how they ended.
type attempts struct {
	Attempts []struct {
		Role, Node string
		Error      *struct{ Message string }
	}
}

// written gives the attempts of the generation node that failed, once they are on disk.
func (r *rig) written(t *testing.T, id string) (l attempts) {
	t.Helper()
	for r.ctx.Err() == nil {
		l = attempts{}
		if err := r.client.Get(r.ctx, "/timelines/"+id, &l); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	failed := l.Attempts[:0]
	for _, a := range l.Attempts {
		if a.Role == "gen" && a.Error != nil {
			failed = append(failed, a)
		}
	}
	l.Attempts = failed
	return l
}

// TestARankEndsWithItsNodeOnly: a signal that goes to all processes is for the node, and no death of the node leaves a rank behind, not
// even one that is stopped.
func TestARankEndsWithItsNodeOnly(t *testing.T) {
	r := start(t, map[string]cluster.Place{"gen0": processes(3)})
	gen := r.Find("gen0")
	ranks := children(t, gen.PID())
	ends := r.long(t, 3)
	for _, pid := range ranks {
		if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		if err := <-ends; err != nil {
			t.Errorf("a request was cut: %v", err)
		}
	}
	if err := syscall.Kill(ranks[0], syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := gen.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(r.ctx, 30*time.Second)
	defer cancel()
	_ = gen.Wait(ctx) // it says that it was killed
	r.gone(t, ranks)
}
