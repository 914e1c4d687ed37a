package card

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// fakes stand for the binaries of a kit: each notes how it was called. What is measured is not their matter.
var fakes = map[string]string{
	"cuda.test":    `case "$*" in *TheCardsOfThisMachine*) cat "$KIT/cards" ;; *Table*) echo "goals: 9 met, 4 missed" ;; *) echo done ;; esac`,
	"kvwire.test":  `echo "12 ms, 80 % of a plain loopback copy"`,
	"account.test": `echo "0.2 %-longer"`,
	"device.test":  `echo "--- PASS: it"`,
	"randmodel":    `mkdir -p "$4" && touch "$4/config.json"`,
	"timeline":     `true`,
	"localcluster": `case "$*" in *--pp*) echo "begun"; sleep 60 ;; serving*--profile*) exit 3 ;; *) echo "12 of 12 cases equal, 90 % (goal 85 %, met)" ;; esac`,
}

const (
	noCard  = "=== RUN   TestTheCardsOfThisMachine\n    cuda_test.go:55: cuda: not available on this machine: open libcuda.so.1: not there\n--- SKIP: TestTheCardsOfThisMachine (0.00s)\nPASS\n"
	oneCard = "    cuda_test.go:60: card 0: NVIDIA H200, sm_90, 132 multiprocessors\n--- PASS: TestTheCardsOfThisMachine (0.2s)\nPASS\n"
)

// kit is a folder as make card-kit leaves it, with fakes.
type kit struct{ dir string }

func newKit(t *testing.T, cards string) kit {
	t.Helper()
	k := kit{t.TempDir()}
	script, err := os.ReadFile("run.sh")
	if err == nil {
		err = errors.Join(os.MkdirAll(filepath.Join(k.dir, "bin"), 0o755), os.MkdirAll(filepath.Join(k.dir, "gpu/cuda"), 0o755),
			os.WriteFile(filepath.Join(k.dir, "run"), script, 0o755), os.WriteFile(filepath.Join(k.dir, "cards"), []byte(cards), 0o644))
	}
	for name, body := range fakes {
		text := "#!/usr/bin/env bash\nKIT=" + k.dir + "\necho \"" + name + " $*\" >>\"$KIT/calls\"\n" + body + "\n"
		err = errors.Join(err, os.WriteFile(filepath.Join(k.dir, "bin", name), []byte(text), 0o755))
	}
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// run runs the script and gives its exit code and what it wrote of each part.
func (k kit) run(t *testing.T, args ...string) (code int, results map[string]string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", append([]string{filepath.Join(k.dir, "run")}, args...)...)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("run %v: %v\n%s", args, err, out)
	}
	results = map[string]string{}
	states, err := filepath.Glob(filepath.Join(k.dir, "results/*.state"))
	if err != nil || len(states) == 0 {
		t.Fatalf("run %v left nothing (%v):\n%s", args, err, out)
	}
	for _, f := range states {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(filepath.Base(f), ".state")
		results[name], _, _ = strings.Cut(string(b), "|")
		summary, err := os.ReadFile(filepath.Join(k.dir, "results/summary.txt"))
		asked := len(args) == 0 || strings.HasPrefix(args[len(args)-2], "-") || slices.Contains(args, name)
		if err != nil || asked && !regexp.MustCompile(`(?m)^`+name+` .* `+regexp.QuoteMeta(results[name])).Match(summary) {
			t.Errorf("run %v: the summary lacks that %s is %q (%v):\n%s", args, name, results[name], err, summary)
		}
	}
	return cmd.ProcessState.ExitCode(), results
}

func (k kit) calls(t *testing.T, pattern string) int {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(k.dir, "calls"))
	if err != nil {
		t.Fatal(err)
	}
	return len(regexp.MustCompile(pattern).FindAllString(string(b), -1))
}

func TestWithoutACardEveryPartSaysSo(t *testing.T) {
	k := newKit(t, noCard)
	code, got := k.run(t)
	if code != 2 || len(got) < 15 {
		t.Errorf("exit %d, %d parts; want 2 and all of them", code, len(got))
	}
	for name, how := range got {
		want := "skipped: no usable card: cuda: not available on this machine: open libcuda.so.1: not there"
		if name == "machine" || name == "loopback" {
			want = "ok"
		}
		if how != want {
			t.Errorf("%s: %q, want %q", name, how, want)
		}
	}
	if n := k.calls(t, "localcluster"); n != 0 {
		t.Errorf("%d clusters were started without a card", n)
	}
	code, got = k.run(t, "--device", "cpu", "verify", "serving")
	if code != 0 || got["verify"] != "ok" || got["serving"] != "ok" || k.calls(t, `localcluster (verify|serving) --device cpu`) != 2 {
		t.Errorf("on the processor: exit %d, %v", code, got)
	}
}

func TestAPartThatHangsOrFailsStopsNoOther(t *testing.T) {
	k := newKit(t, oneCard)
	code, got := k.run(t, "--limit", "verify-pp=5", "--limit", "soak=70")
	want := map[string]string{
		"table": "ok", "verify": "ok", "verify-ranks": "ok", "profile": "failed: exit 3", "verify-pp": "cut: after 5 s, its limit", "soak": "cut: 20 s of load, 480 were asked for",
	}
	for name, how := range want {
		if got[name] != how {
			t.Errorf("%s: %q, want %q", name, got[name], how)
		}
	}
	if code != 1 {
		t.Errorf("exit %d with a part that failed, want 1", code)
	}
	if b, err := os.ReadFile(filepath.Join(k.dir, "results/verify-pp.txt")); err != nil || !strings.Contains(string(b), "begun") {
		t.Errorf("of the part that was cut is left %q, %v", b, err)
	}
	k.run(t, "--limit", "verify-pp=5", "--limit", "soak=70")
	if k.calls(t, "localcluster demo") != 1 || k.calls(t, "all=--pp=2") != 2 {
		t.Error("a second run does not go on with what had not ended well")
	}
	if code, got := k.run(t, "two-gpus", "verify"); code != 2 || got["two-gpus"] != "skipped: 2 cards are needed, there is 1" || k.calls(t, `verify --device cuda --cases 12\n`) != 2 {
		t.Errorf("named parts: exit %d, %v", code, got)
	}
}

func TestWhatABudgetDoesNotHoldIsSaidToBeCut(t *testing.T) {
	k := newKit(t, oneCard)
	code, got := k.run(t, "--budget", "0")
	for name, how := range got {
		if how != "cut: the budget of 0 s was over" {
			t.Errorf("%s: %q", name, how)
		}
	}
	if code != 2 || k.calls(t, "localcluster") != 0 {
		t.Errorf("exit %d, want 2 and nothing started", code)
	}
}

func TestBadArgumentsAreRefused(t *testing.T) {
	k := newKit(t, oneCard)
	for _, args := range [][]string{{"nothing"}, {"--nothing"}, {"--device", "tpu"}} {
		cmd := exec.Command("bash", append([]string{filepath.Join(k.dir, "run")}, args...)...)
		if out, err := cmd.CombinedOutput(); cmd.ProcessState.ExitCode() != 64 || !strings.Contains(string(out), args[len(args)-1]) {
			t.Errorf("%v: %v, %s", args, err, out)
		}
	}
}
