package ranks

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"meridian.internal/e2e/client"
	"meridian.internal/e2e/cluster"
	"meridian.internal/e2e/clustertest"
)

// shape is the ranks of a node and the stages of each.
type shape struct{ ranks, stages int }

func (s shape) flags(more ...string) cluster.Place {
	return cluster.Place{Args: append([]string{fmt.Sprint("--ranks=", s.ranks), fmt.Sprint("--pp=", s.stages)}, more...)}
}

// rig is a running cluster of a context and a generation node.
type rig struct {
	*cluster.Cluster
	client *client.Client
	ctx    context.Context
	bin    string
}

func start(t *testing.T, places map[string]cluster.Place) *rig {
	t.Helper()
	c, ctx := clustertest.Start(t, cluster.Config{
		Ctx: 1, Gen: 1, Device: "cpu", Places: places, NodeArgs: []string{"--max-num-tokens=128", "--iter-stats-max=100000", "--return-perf-metrics"},
	}, 2*time.Minute)
	cl := client.New(c.URL(), 8)
	t.Cleanup(cl.Close)
	return &rig{Cluster: c, client: cl, ctx: ctx, bin: clustertest.Binaries(t)}
}

const cases = 16

// texts sends prompts of which every second is sampled with a seed, and then all again, when their KV is cached.
func (r *rig) texts(t *testing.T) (out [2 * cases]string) {
	t.Helper()
	for round := range 2 {
		var wg sync.WaitGroup
		for i := range cases {
			wg.Go(func() {
				prompt := make([]int, 1+(i*97)%500)
				for k := range prompt {
					prompt[k] = 10 + (k*7+i/4*k/90)%1900 // some begin alike
				}
				f := map[string]any{
					"model": "meridian-tiny", "prompt": prompt, "max_tokens": 12 + i, "temperature": 0, "stream": true, "seed": i, "ignore_eos": true,
				}
				if i%2 == 1 {
					f["temperature"], f["top_p"] = 0.9, 0.95
				}
				res, err := r.client.Do(r.ctx, client.Request{ID: fmt.Sprint("r", round, "-", i), Fields: f})
				if err != nil {
					t.Errorf("round %d, case %d: %v", round, i, err)
				}
				out[round*cases+i] = res.Text
			})
		}
		wg.Wait()
	}
	return out
}

// timeline runs the command and gives what it says; it must end well.
func (r *rig) timeline(t *testing.T, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(r.ctx, filepath.Join(r.bin, "timeline"), args...).CombinedOutput()
	if err != nil {
		t.Errorf("timeline %s: %v\n%.2000s", args[0], err, out)
	}
	return string(out)
}

// moved gives the KV bytes that went from node to node.
func (r *rig) moved(t *testing.T) (bytes int64) {
	t.Helper()
	for i := range 2 * cases {
		l, err := r.client.Whole(r.ctx, fmt.Sprint("r", i/cases, "-", i%cases))
		if err != nil || !l.Complete || len(l.Violations) > 0 {
			t.Errorf("timeline of case %d: %v, missing %v, violations %v", i, err, l.Missing, l.Violations)
		}
		if l.Handover != nil {
			bytes += l.Handover.Bytes
		}
	}
	return bytes
}

// agree holds rows, counters and records of all nodes against each other.
func (r *rig) agree(t *testing.T) {
	t.Helper()
	args := []string{"rows", "-o", r.Traces()}
	for _, p := range r.Nodes {
		args = append(args, p.URL)
	}
	r.timeline(t, args...)
	r.timeline(t, "check", r.Traces())
}

// gives wants the texts of another cluster, KV that moved, and ledgers that agree.
func (r *rig) gives(t *testing.T, want [2 * cases]string) {
	t.Helper()
	for i, got := range r.texts(t) {
		if got != want[i] || got == "" {
			t.Errorf("case %d of round %d: %q, want %q", i%cases, i/cases, got, want[i])
		}
	}
	if r.moved(t) == 0 {
		t.Error("no KV was handed over")
	}
	r.agree(t)
}

// TestTextsAreThoseOfOneDevice runs the same prompts on nodes of other shapes, with hand-over and reuse. All pairs of shapes are
// compared in gpu/ranks, on simulated devices in one process.
func TestTextsAreThoseOfOneDevice(t *testing.T) {
	one := shape{1, 1}
	want := start(t, map[string]cluster.Place{"ctx0": one.flags(), "gen0": one.flags()}).texts(t)
	for _, c := range []struct {
		ctx, gen shape
		more     string // flags of the generation node
	}{
		{shape{1, 1}, shape{4, 1}, "--metrics-all-ranks"}, {shape{2, 1}, shape{1, 4}, "--overlap"}, {shape{1, 2}, shape{4, 1}, "--rank-processes --metrics-all-ranks"},
		{shape{4, 2}, shape{2, 2}, "--rank-processes"}, {shape{1, 4}, shape{2, 1}, "--no-overlap"}, {shape{4, 4}, shape{1, 2}, "--overlap"},
	} {
		t.Run(fmt.Sprintf("%d ranks of %d stages to %d of %d %s", c.ctx.ranks, c.ctx.stages, c.gen.ranks, c.gen.stages, c.more), func(t *testing.T) {
			r := start(t, map[string]cluster.Place{"ctx0": c.ctx.flags(), "gen0": c.gen.flags(strings.Fields(c.more)...)})
			r.gives(t, want)
		})
	}
}

// TestRanksAndStagesAreSeen looks for ranks and stages wherever a person would.
func TestRanksAndStagesAreSeen(t *testing.T) {
	two := shape{2, 2}
	r := start(t, map[string]cluster.Place{"ctx0": two.flags(), "gen0": two.flags()})
	r.texts(t)
	r.moved(t)
	r.agree(t)
	var view struct {
		Nodes []struct {
			Name  string
			Ranks []struct {
				KVMaxBlocks int `json:"kv_max_blocks"`
			}
			Stages int
		}
	}
	if err := r.client.Get(r.ctx, "/cluster", &view); err != nil || len(view.Nodes) != 2 {
		t.Fatalf("cluster %+v, %v", view, err)
	}
	for _, n := range view.Nodes {
		if len(n.Ranks) != 2 || n.Stages != 2 || n.Ranks[1].KVMaxBlocks == 0 {
			t.Errorf("/cluster says of %s: %+v", n.Name, n)
		}
	}
	var line struct {
		Phases []struct {
			Role   string
			DPRank *int `json:"dp_rank"`
			Chunks []any
			Steps  map[string][]int64
		}
	}
	if err := r.client.Get(r.ctx, "/timelines/r0-5", &line); err != nil || len(line.Phases) != 3 {
		t.Fatalf("line %+v, %v", line, err)
	}
	for _, p := range line.Phases {
		if (p.DPRank == nil) != (p.Role == "disagg") {
			t.Errorf("rank %v of %s", p.DPRank, p.Role)
		}
	}
	if p := line.Phases[1]; len(p.Chunks) != 9 {
		t.Errorf("chunks of the context node have %d columns, want those of a cut between two stages too", len(p.Chunks))
	}
	for i, entered := range line.Phases[2].Steps["stage1_start_ns"] {
		s := line.Phases[2].Steps
		if left := s["stage0_end_ns"][i]; s["forward_start_ns"][i] >= left || left > entered || entered >= s["forward_end_ns"][i] {
			t.Errorf("step %d: %v", i, s)
		}
	}
	if n := len(line.Phases[2].Steps["stage1_start_ns"]); n < 10 {
		t.Errorf("%d steps have stages", n)
	}
	trace := r.timeline(t, "export", "--format=chrome", r.Traces())
	metrics := r.metricsOfWork(t, r.Find("gen0").URL+"/metrics", "meridian_rank_imbalance_ratio{")
	for _, c := range []struct{ text, want string }{
		{trace, `"engine rank 0 stage 1"`}, {trace, `"engine rank 1 stage 0"`}, {metrics, `dp_rank="1"`}, {metrics, `pipeline_parallel_size="2"`},
		{metrics, "meridian_rank_imbalance_ratio{"}, {r.body(t, r.URL()+"/web/app.js"), "dp_rank"},
	} {
		if !strings.Contains(c.text, c.want) {
			t.Errorf("%s is missing in %.300s", c.want, c.text)
		}
	}
	rows, err := filepath.Glob(filepath.Join(r.Traces(), "*.rows.ndjson"))
	if err != nil || len(rows) != 2 {
		t.Fatalf("files of rows %v, %v", rows, err)
	}
	for _, file := range rows {
		b, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(b), `"attentionDpRank":1`) || !strings.Contains(string(b), `"microBatchId":1`) || !strings.Contains(string(b), `"schedulerMode":"overlap"`) {
			t.Errorf("rows in %s lack ranks or stages: %v", file, err)
		}
		for row := range strings.Lines(string(b)) { // the process has its memory, and the queue, once
			if strings.Contains(row, `"attentionDpRank":1`) && (!strings.Contains(row, `"cpuMemUsage":null`) || !strings.Contains(row, `"numNewRequests":null`)) {
				t.Fatalf("a row of rank 1 tells of what is not its own: %s", row)
			}
		}
	}
}

// metricsOfWork gives metrics that were read while requests ran: a text that is absent while there is nothing to balance is waited for.
func (r *rig) metricsOfWork(t *testing.T, url, text string) (metrics string) {
	t.Helper()
	enough := make(chan struct{})
	var load sync.WaitGroup
	load.Go(func() {
		f := map[string]any{"model": "meridian-tiny", "prompt": []int{1, 2, 3}, "max_tokens": 100, "stream": true, "ignore_eos": true}
		for i := 0; ; i++ {
			select {
			case <-enough:
				return
			default:
			}
			if _, err := r.client.Do(r.ctx, client.Request{ID: fmt.Sprint("work-", i), Fields: f}); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for metrics = r.body(t, url); !strings.Contains(metrics, text) && r.ctx.Err() == nil && !t.Failed(); {
		metrics = r.body(t, url)
	}
	close(enough)
	load.Wait()
	return metrics
}

func (r *rig) body(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(r.ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Errorf("%s: status %d, %v", url, res.StatusCode, err)
	}
	return string(b)
}
