package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"
	"time"
)

const maxLine = 8 << 20

// event is one line of go test -json.
type event struct {
	Action, Package, Test, Output string
	ImportPath                    string
	Elapsed                       float64
}

type testKey struct{ pkg, test string }

// tally counts the outcomes and keeps the output of the tests that are not over, to print it when one fails.
type tally struct {
	w                       io.Writer
	start                   time.Time
	output                  map[testKey][]string
	passed, failed, skipped int
	brokenPackages          int
	why                     map[string]int // reason of a skip: how many
}

func newTally(w io.Writer) *tally {
	return &tally{w: w, start: time.Now(), output: map[testKey][]string{}, why: map[string]int{}}
}

func (t *tally) read(r io.Reader) error {
	s := bufio.NewScanner(r)
	s.Buffer(make([]byte, 0, 64<<10), maxLine)
	for s.Scan() {
		var e event
		if json.Unmarshal(s.Bytes(), &e) != nil {
			fmt.Fprintln(t.w, s.Text())
			continue
		}
		t.take(e)
	}
	return s.Err()
}

func (t *tally) take(e event) {
	k := testKey{e.Package, e.Test}
	switch e.Action {
	case "output":
		t.output[k] = append(t.output[k], e.Output)
	case "build-output":
		fmt.Fprint(t.w, e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			t.endPackage(e)
		} else {
			t.endTest(e, k)
		}
	}
}

func (t *tally) endTest(e event, k testKey) {
	switch e.Action {
	case "pass":
		t.passed++
	case "skip":
		t.skipped++
		t.why[reason(t.output[k])]++
	case "fail":
		t.failed++
		fmt.Fprint(t.w, strings.Join(t.output[k], ""))
	}
	delete(t.output, k)
}

func (t *tally) endPackage(e event) {
	k := testKey{e.Package, ""}
	if e.Action == "fail" {
		t.brokenPackages++
		for other, out := range t.output { // tests that never ended: a panic or a time-out
			if other.pkg == e.Package {
				fmt.Fprint(t.w, strings.Join(out, ""))
				delete(t.output, other)
			}
		}
	}
	delete(t.output, k)
	if e.Action != "skip" { // a package without tests
		fmt.Fprintf(t.w, "%-4s %s %.1fs\n", map[string]string{"pass": "ok", "fail": "FAIL"}[e.Action], e.Package, e.Elapsed)
	}
}

// reason finds the text of t.Skip in the output of a skipped test: "    file.go:12: text". What it logged before looks alike.
func reason(out []string) string {
	for _, line := range slices.Backward(out) {
		line = strings.TrimSpace(line)
		if at := strings.Index(line, ".go:"); at >= 0 {
			if _, text, ok := strings.Cut(line[at+len(".go:"):], ": "); ok {
				return text
			}
		}
	}
	return "no reason given"
}

func (t *tally) summary() {
	reasons := make([]string, 0, len(t.why))
	for r := range t.why {
		reasons = append(reasons, r)
	}
	sort.Strings(reasons)
	for _, r := range reasons {
		fmt.Fprintf(t.w, "skipped %d: %s\n", t.why[r], r)
	}
	if t.brokenPackages > 0 {
		fmt.Fprintf(t.w, "%d packages failed\n", t.brokenPackages)
	}
	fmt.Fprintf(t.w, "%d tests ran in %s\n", t.passed+t.failed, time.Since(t.start).Round(time.Second))
	fmt.Fprintf(t.w, "%d passed, %d failed, %d skipped\n", t.passed, t.failed, t.skipped)
}
