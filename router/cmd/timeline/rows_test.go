package main

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"meridian.internal/router/rowcheck"
	"meridian.internal/router/rowlog"
	"meridian.internal/shared/rows"
)

// aNode answers as a node does.
func aNode(t *testing.T, newRequests int64) *httptest.Server {
	t.Helper()
	ring := rows.NewRing(rows.Static{Node: "gen/0", ClockID: "c"}, 10)
	for i := range int64(3) {
		r := rows.Row{Iter: i + 1, Covers: 1}
		if i == 0 {
			r.Requests.New = 1
		}
		if i == 2 {
			r.Requests.Completed = 1
		}
		ring.Put(&r)
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			fmt.Fprintf(w, "# TYPE meridian_num_requests_new_total counter\nmeridian_num_requests_new_total{model_name=\"a } b\"} %d\n", newRequests)
			return
		}
		after, _ := strconv.ParseInt(r.URL.Query().Get("after"), 10, 64)
		p := ring.Read(after, 2)
		fmt.Fprintf(w, `{"enabled":true,"next":%d,"newest":%d,"dropped":%d,"rows":[`, p.Next, p.Last, p.Dropped)
		for i, text := range p.Rows {
			if i > 0 {
				fmt.Fprint(w, ",")
			}
			w.Write(text)
		}
		fmt.Fprint(w, "]}")
	}))
	t.Cleanup(srv.Close)
	return srv
}

func TestRowsAreFetchedAndChecked(t *testing.T) {
	for _, tt := range []struct {
		name    string
		counter int64
		code    int
	}{{"counters agree with rows", 1, 0}, {"counters that do not", 2, 1}} {
		dir := t.TempDir()
		c := rowsCmd{Node: []string{aNode(t, tt.counter).URL}, Output: dir, Every: time.Hour}
		f := &rowFile{client: http.DefaultClient, url: c.Node[0], dir: dir}
		if err := errors.Join(f.read(t.Context()), f.read(t.Context()), f.read(t.Context()), f.finish(t.Context())); err != nil {
			t.Fatal(err)
		}
		names, err := filepath.Glob(filepath.Join(dir, "*"+rowlog.Suffix))
		if err != nil || len(names) != 1 || f.rows != 3 {
			t.Fatalf("%v, %v, %d rows", names, err, f.rows)
		}
		err = (&checkCmd{Max: 9, files: files{File: names}}).Run(t.Context())
		var e exit
		if errors.As(err, &e); e.code != tt.code {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}

func TestAllRowsAreFetchedAlsoWhereAnAnswerHoldsAPartOfThem(t *testing.T) {
	dir := t.TempDir()
	if err := (&rowsCmd{Node: []string{aNode(t, 1).URL}, Output: dir, Every: time.Hour}).Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := (&checkCmd{Max: 9, files: files{File: []string{dir}}}).Run(t.Context()); err != nil {
		t.Error(err)
	}
	b, err := os.ReadFile(filepath.Join(dir, rowlog.Name("gen/0", "c")))
	if n := strings.Count(string(b), rows.Schema); err != nil || n != 3 {
		t.Errorf("%v, %d rows of 3", err, n)
	}
}

func TestANodeThatCannotBeReadEndsTheFilesOfOthersWhole(t *testing.T) {
	var asked atomic.Int64
	fails := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) > 1 {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		fmt.Fprint(w, `{"enabled":true}`)
	}))
	defer fails.Close()
	dir := t.TempDir()
	c := rowsCmd{Node: []string{aNode(t, 1).URL, fails.URL}, Output: dir, Every: time.Millisecond, Follow: true}
	err := c.Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "status 401") || strings.Contains(err.Error(), "%!") {
		t.Errorf("the error is %v", err)
	}
	b, err := os.ReadFile(filepath.Join(dir, rowlog.Name("gen/0", "c")))
	if err != nil || strings.Count(string(b), "\n") < 3 || !strings.Contains(string(b), rowcheck.CountersSchema) {
		t.Errorf("%v, the file of the node that answered holds %q", err, b)
	}
}

func TestAProcessThatBeganAnewIsNoticedByItsClock(t *testing.T) {
	var clock atomic.Pointer[string]
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		after, _ := strconv.ParseInt(r.URL.Query().Get("after"), 10, 64)
		fmt.Fprintf(w, `{"enabled":true,"clock_id":%q,"next":%d,"newest":%[2]d,"rows":[{"node":"n","clock_id":%[1]q,"seq":%[2]d}]}`, *clock.Load(), after+1)
	}))
	defer srv.Close()
	f := &rowFile{client: http.DefaultClient, url: srv.URL, dir: t.TempDir()}
	for _, id := range []string{"c.1", "c.1"} {
		clock.Store(&id)
		if err := f.read(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	next := "c.2"
	clock.Store(&next)
	if err := f.read(t.Context()); err == nil || f.rows != 2 {
		t.Errorf("%v: %d rows of two processes are in one file", err, f.rows)
	}
}

func TestCountersAreRead(t *testing.T) {
	got := parseCounters("# HELP x y\nmeridian_a_total{b=\"c } d\"} 2\nmeridian_a_total{b=\"e\"} 3\nmeridian_gauge 5\nother_total 1\nmeridian_b_total 1e3\nmeridian_c_total x\n")
	if len(got) != 2 || got["meridian_a_total"] != 5 || got["meridian_b_total"] != 1000 {
		t.Errorf("%v", got)
	}
}

func TestRowsBesideTimelinesAreFound(t *testing.T) {
	dir := t.TempDir()
	for _, n := range []string{"a.rows.ndjson", "b.rows.ndjson", "timeline-x.jsonl"} {
		if err := os.WriteFile(filepath.Join(dir, n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{dir}, {filepath.Join(dir, "timeline-x.jsonl")}, {filepath.Join(dir, "a.rows.ndjson"), dir}} {
		if found, _, err := rowFiles(args); err != nil || len(found) != 2 {
			t.Errorf("%v: %v, %v", args, found, err)
		}
	}
	if found, others, _ := rowFiles([]string{filepath.Join(dir, "a.rows.ndjson")}); len(found) != 1 || len(others) != 0 {
		t.Errorf("%v %v", found, others)
	}
	alone := t.TempDir()
	if err := os.WriteFile(filepath.Join(alone, "c.rows.ndjson"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if found, others, _ := rowFiles([]string{dir, alone}); len(found) != 3 || len(others) != 1 {
		t.Errorf("a folder of rows alone: %v %v", found, others)
	}
}

func TestBadRowsWithoutTimelinesAreNamedAndSkipped(t *testing.T) {
	name := filepath.Join(t.TempDir(), "a.rows.ndjson")
	if err := os.WriteFile(name, []byte("no row\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	text, code := output(t, func() error {
		return (&exportCmd{Format: "chrome", Output: "-", files: files{File: []string{name}}}).Run(t.Context())
	})
	if code != 0 || !strings.Contains(text, name+":1: ") {
		t.Errorf("exit %d\n%s", code, text)
	}
}
