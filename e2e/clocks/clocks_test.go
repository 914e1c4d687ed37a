package clocks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"meridian.internal/e2e/cluster"
)

func binaries(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("starts clusters of real processes")
	}
	if os.Getenv("MERIDIAN_TEST_BIN") == "" {
		t.Skip("MERIDIAN_TEST_BIN is not set: make test builds the binaries and sets it")
	}
	bin, err := cluster.Binaries()
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

// localcluster runs the command and gives what it said and its exit code.
func localcluster(t *testing.T, args ...string) (string, int) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), filepath.Join(binaries(t), "localcluster"), args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return string(out), cmd.ProcessState.ExitCode()
}

func TestTrueOffsetsLieWithinTheBoundsAcrossNamespacesAndPaths(t *testing.T) {
	binaries(t)
	if err := cluster.CanPlace(); err != nil {
		t.Skip(err)
	}
	out, code := localcluster(t, "clocks", "--for=10s", "--dir="+t.TempDir(), "--gen=2", "--time-shift=gen0=1000000s", "--shuttle=gen1=1ms/5ms")
	t.Log("\n" + out)
	if code != 0 || !strings.Contains(out, "0 incomplete, 0 violations") {
		t.Fatalf("exit code %d", code)
	}
	for _, want := range []string{
		`gen0 +clocksync to router +-1000000000000000 +\d+ +0 .* synced`, `gen0 +timelines +-1000000000000000 +\d+ +0 .* synced`,
		`gen1 +timelines +0 +\d+ +0 +(1\.[5-9]\d*|2(\.[0-4]\d*)?)ms .* synced`, // half of the asymmetry is 2 ms, and nobody can know better
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("no line %s", want)
		}
	}
}

func TestANodeThatLiesByAMillisecondIsNamed(t *testing.T) {
	for _, liar := range []string{"ctx0", "gen1"} {
		out, code := localcluster(t, "clocks", "--for=6s", "--dir="+t.TempDir(), "--ctx=1", "--gen=2", "--node-flag="+liar+"=--fault-clock-lie=1ms")
		if code != 1 || !strings.Contains(out, "the clock of "+liar+" is wrong by at least 0.") {
			t.Errorf("exit code %d; %s lies, and this was said:\n%s", code, liar, out)
		}
	}
}

// clocksNow is the part of GET /clocks that these tests read.
type clocksNow struct {
	Name   string
	Leads  bool
	Clocks []struct {
		Node, Reference, State string
		Samples                int64
		BoundNS                *int64 `json:"bound_ns"`
		SkewPPB                *int64 `json:"skew_ppb"`
	}
}

func ask(ctx context.Context, url string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// patience is how long until waits on a loaded machine: it tells late from never.
const patience = time.Minute

// until polls until ok, and gives the time that took.
func until(t *testing.T, what string, ok func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !ok() {
		if time.Since(start) > patience {
			t.Fatalf("%s: not within %v", what, patience)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-t.Context().Done():
			t.Fatal(t.Context().Err())
		}
	}
	return time.Since(start)
}

// standby starts another clocksync beside the cluster's.
func standby(t *testing.T, c *cluster.Cluster, bin, nats string) string {
	t.Helper()
	const listen = "127.0.0.1:0"
	log := filepath.Join(t.TempDir(), "standby.log")
	f, err := os.Create(log)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(bin, "clocksync"), "--name=standby", "--listen="+listen, "--nats="+nats)
	cmd.Stdout, cmd.Stderr = f, f
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
		f.Close()
	})
	address := regexp.MustCompile(`msg="clocksync serves" listen=(\S+)`)
	url := ""
	until(t, "the second clocksync says where it serves", func() bool {
		b, _ := os.ReadFile(log)
		if m := address.FindSubmatch(b); m != nil {
			url = "http://" + string(m[1])
		}
		return url != ""
	})
	return url
}

// A daemon that is killed outright, with nothing said, is replaced by the one beside it; and a daemon that starts where none is
// knows from the log what its predecessor measured.
func TestAnotherClocksyncTakesOverAKilledOne(t *testing.T) {
	bin := binaries(t)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	c, err := cluster.Start(ctx, cluster.Config{
		Bin: bin, Dir: t.TempDir(), Ctx: 1, Gen: 1, Device: "sim", Logger: slog.New(slog.DiscardHandler),
		// Clocks that are bent differ from each other, so that there is something to know.
		Places: map[string]cluster.Place{"ctx0": {Args: []string{"--fault-clock-skew-ppm=40"}}, "gen0": {Args: []string{"--fault-clock-skew-ppm=-30"}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Stop() // the killed one is an error
	second := standby(t, c, bin, c.NATS)
	var old, now clocksNow
	synced := func(url string, into *clocksNow) bool {
		*into = clocksNow{}
		if ask(ctx, url+"/clocks", into) != nil {
			return false
		}
		n := 0
		for _, r := range into.Clocks {
			if r.Reference == into.Name && r.State == "synced" && r.SkewPPB != nil && *r.BoundNS < 100_000 {
				n++
			}
		}
		return n == 2
	}
	until(t, "the first clocksync leads and knows both clocks", func() bool { return synced(c.Clock.URL, &old) && old.Leads })
	until(t, "the second knows them too", func() bool { return synced(second, &now) })
	if now.Leads {
		t.Fatal("two clocksyncs lead")
	}
	if err := c.Clock.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	took := until(t, "the second leads", func() bool { return synced(second, &now) && now.Leads })
	t.Logf("took over %v after the kill, knowing both clocks", took)
	// A third, in the place of the first: what it knows at once, from 16 exchanges, the log makes good for minutes of probing.
	if err := c.Restart(ctx, c.Clock); err != nil {
		t.Fatal(err)
	}
	var again clocksNow
	took = until(t, "the restarted one knows both clocks", func() bool { return synced(c.Clock.URL, &again) })
	for _, r := range again.Clocks {
		if r.Reference == again.Name && r.Node != "router" && (*r.SkewPPB < 0) != (r.Node == "ctx0") {
			t.Errorf("%s has a skew of %d ppb", r.Node, *r.SkewPPB)
		}
	}
	b, err := os.ReadFile(c.Clock.Log)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(b), "clock history read") {
		t.Error("the restarted one has read no history")
	}
	t.Logf("restarted, it knew both clocks within %v of being ready", took)
}
