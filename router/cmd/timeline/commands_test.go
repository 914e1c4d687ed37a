package main

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

func ptr(v int64) *int64 { return &v }

func traceFile(t *testing.T, lines ...*timeline.Line) string {
	t.Helper()
	var b []byte
	for _, l := range lines {
		b = append(timeline.Append(b, l), '\n')
	}
	path := filepath.Join(t.TempDir(), "timeline-h-1-x-00000.jsonl")
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func line(id string, ttft int64) *timeline.Line {
	return &timeline.Line{
		Schema: timeline.Schema, RequestID: id, ClientRequestID: "c-" + id, Outcome: phase.Finished, Complete: true, TTFTNS: &ttft, E2ENS: ptr(ttft + 10), UnaccountedNS: ptr(0),
		Spans: []timeline.Span{{Name: "prefill", Node: "ctx0", DurNS: ttft}, {Name: "decode", Node: "r", StartNS: ttft, DurNS: 10}},
	}
}

// output runs f with stdout and stderr caught.
func output(t *testing.T, f func() error) (string, int) {
	t.Helper()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, stderr := os.Stdout, os.Stderr
	os.Stdout, os.Stderr = w, w
	text := make(chan string)
	go func() {
		b, _ := io.ReadAll(r)
		text <- string(b)
	}()
	err = f()
	os.Stdout, os.Stderr = stdout, stderr
	w.Close()
	code := 0
	var e exit
	if errors.As(err, &e) {
		code = e.code
	} else if err != nil {
		code = 1
	}
	return <-text, code
}

func TestShow(t *testing.T) {
	f := files{File: []string{traceFile(t, line("a", 5), line("b", 9), line("c", 7))}}
	cases := []struct {
		id, want string
		code     int
	}{{"a", "a  (c-a)", 0}, {"c-c", "c  (c-c)", 0}, {"last", "c  (c-c)", 0}, {"slowest", "b  (c-b)", 0}, {"nobody", "", 1}}
	for _, c := range cases {
		text, code := output(t, func() error { return (&showCmd{ID: c.id, files: f, Color: "never"}).Run(t.Context()) })
		if code != c.code || !strings.Contains(text, c.want) {
			t.Errorf("show %s: exit %d\n%s", c.id, code, text)
		}
	}
}

func TestCheckTellsByItsExitCode(t *testing.T) {
	wrong := line("w", 5)
	wrong.Spans[0].DurNS++
	torn := traceFile(t, line("a", 5))
	os.WriteFile(torn, []byte("{\"torn\n"), 0o644)
	cases := []struct {
		name, file, want string
		code             int
	}{
		{"all holds", traceFile(t, line("a", 5), line("b", 6)), "2 requests, 0 incomplete, 0 violations", 0},
		{"a violation", traceFile(t, line("a", 5), wrong), ":2: request w: spans and unaccounted sum to 16 ns", 1},
		{"a bad line", torn, ":1: timeline: bad line", 1},
		{"no file", "/nowhere/file.jsonl", "", 2},
	}
	for _, c := range cases {
		text, code := output(t, func() error { return (&checkCmd{Max: 50, files: files{File: []string{c.file}}}).Run(t.Context()) })
		if code != c.code || !strings.Contains(text, c.want) {
			t.Errorf("%s: exit %d\n%s", c.name, code, text)
		}
	}
}

func TestACheckThatCannotSpeakFails(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("no /dev/full: " + err.Error())
	}
	defer full.Close()
	stdout := os.Stdout
	os.Stdout = full
	err = (&checkCmd{Max: 50, files: files{File: []string{traceFile(t, line("a", 5))}}}).Run(t.Context())
	os.Stdout = stdout
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("error %v, want that of the disk", err)
	}
}

func TestSummaryAsTextAndAsJSON(t *testing.T) {
	f := files{File: []string{traceFile(t, line("a", 5), line("b", 6))}}
	for _, c := range []struct {
		json bool
		want string
	}{{false, "2 requests"}, {true, `"requests":2`}} {
		text, code := output(t, func() error { return (&summaryCmd{JSON: c.json, Top: 1, Color: "never", files: f}).Run(t.Context()) })
		if code != 0 || !strings.Contains(text, c.want) {
			t.Errorf("exit %d\n%s", code, text)
		}
	}
}

func TestAFileOfNoTimelinesIsUnreadable(t *testing.T) {
	name := filepath.Join(t.TempDir(), "README.md")
	if err := os.WriteFile(name, []byte("# Not\n\nours\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	text, code := output(t, func() error {
		return (&summaryCmd{Color: "never", files: files{File: []string{name}}}).Run(t.Context())
	})
	if code != 2 || strings.Contains(text, "0 requests") {
		t.Errorf("exit %d\n%s", code, text)
	}
	text, code = output(t, func() error {
		return (&exportCmd{Format: "csv", Output: "-", files: files{File: []string{name}}}).Run(t.Context())
	})
	if code != 2 || !strings.Contains(text, ":1: ") {
		t.Errorf("export: exit %d\n%s", code, text)
	}
}

func TestBadLinesThatAreNotListedAreMentioned(t *testing.T) {
	for _, bad := range []int{10, 11, 500} {
		name := traceFile(t, line("a", 5))
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, append(b, strings.Repeat("bad\n", bad)...), 0o600); err != nil {
			t.Fatal(err)
		}
		text, code := output(t, func() error {
			return (&summaryCmd{Color: "never", files: files{File: []string{name}}}).Run(t.Context())
		})
		if code != 0 || strings.Count(text, "the line is skipped") != 10 || strings.Contains(text, "further ones are skipped") != (bad > 10) {
			t.Errorf("%d bad lines: exit %d\n%s", bad, code, text)
		}
	}
}

func TestExportDoesNotWriteOverWhatItReads(t *testing.T) {
	name := traceFile(t, line("a", 5))
	link := filepath.Join(t.TempDir(), "out.csv")
	if err := os.Symlink(name, link); err != nil {
		t.Fatal(err)
	}
	before, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, out := range []string{name, link} {
		_, code := output(t, func() error {
			return (&exportCmd{Format: "csv", Output: out, files: files{File: []string{filepath.Dir(name)}}}).Run(t.Context())
		})
		if after, err := os.ReadFile(name); code == 0 || err != nil || string(after) != string(before) {
			t.Errorf("export to %s: exit %d, %v, the timelines are\n%s", out, code, err, after)
		}
	}
}

func TestTheCommandKnowsNoEngineAndNoNode(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Skip("go list does not run here: " + err.Error())
	}
	for _, dep := range strings.Fields(string(out)) {
		for _, bad := range []string{"meridian.internal/gpu", "meridian.internal/ctxnode", "meridian.internal/gennode", "github.com/nats-io/nats-server"} {
			if strings.HasPrefix(dep, bad) {
				t.Errorf("imports %s", dep)
			}
		}
	}
}

func TestDiffAdviseAndExportRead(t *testing.T) {
	a, b := traceFile(t, line("a", 5), line("b", 6)), traceFile(t, line("a", 7))
	out := filepath.Join(t.TempDir(), "out.json")
	cases := []struct {
		name, want string
		run        func() error
		code       int
	}{
		{"diff", "time to first token", func() error { return (&diffCmd{A: a, B: b, Color: "never"}).Run(t.Context()) }, 0},
		{"diff as JSON", `"name":"prefill"`, func() error { return (&diffCmd{A: a, B: b, JSON: true}).Run(t.Context()) }, 0},
		{"diff with nothing", "", func() error { return (&diffCmd{A: a, B: "/nowhere"}).Run(t.Context()) }, 2},
		{"advise", "Cannot tell", func() error { return (&adviseCmd{Color: "never", files: files{File: []string{a}}}).Run(t.Context()) }, 0},
		{"export to the screen", "request_id,", func() error {
			return (&exportCmd{Format: "csv", Output: "-", files: files{File: []string{a}}}).Run(t.Context())
		}, 0},
		{"export to a file", "", func() error {
			return (&exportCmd{Format: "chrome", Output: out, files: files{File: []string{a}}}).Run(t.Context())
		}, 0},
		{"export to nowhere", "", func() error {
			return (&exportCmd{Format: "chrome", Output: "/nowhere/out", files: files{File: []string{a}}}).Run(t.Context())
		}, 1},
	}
	for _, c := range cases {
		if text, code := output(t, c.run); code != c.code || !strings.Contains(text, c.want) {
			t.Errorf("%s: exit %d\n%s", c.name, code, text)
		}
	}
	if b, err := os.ReadFile(out); err != nil || !strings.Contains(string(b), `"traceEvents"`) {
		t.Errorf("%v: %s", err, b)
	}
	if s := oneLine(line("a", 5)); !strings.Contains(s, "5 ns prefill on ctx0") {
		t.Errorf("%s", s)
	}
}
