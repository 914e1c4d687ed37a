package cluster

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestMain plays every daemon when the test binary is called by a daemon's name: the tests link it under those names.
func TestMain(m *testing.M) {
	if name := filepath.Base(os.Args[0]); slices.Contains(daemons(), name) {
		os.Exit(fake(name, os.Args[1:]))
	}
	os.Exit(m.Run())
}

func daemons() []string { return []string{"router", "ctxnode", "gennode", "clocksync", "timeline"} }

// fake is a daemon that is ready at once, sees nodes ctx0 and gen0, and does what the file behave.NAME beside it says:
// "refuse" to start, "deaf" to SIGTERM, "sick" after it.
func fake(name string, args []string) int {
	behaviour, _ := os.ReadFile(filepath.Join(filepath.Dir(os.Args[0]), "behave."+name))
	if string(behaviour) == "refuse" {
		fmt.Println("I will not")
		return 3
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	fmt.Println(strings.Join(args, " "), os.Getenv("MERIDIAN_NAME"))
	http.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/cluster" {
			io.WriteString(w, `{"nodes":[{"name":"ctx0","state":"ready","clock":{"bound_ns":1}},{"name":"gen0","state":"ready","clock":{"bound_ns":1}}]}`)
		}
	})
	go http.ListenAndServe(args[slices.Index(args, "--listen")+1], nil)
	<-term
	switch string(behaviour) {
	case "deaf":
		select {}
	case "sick":
		return 4
	}
	return 0
}

// fakes links the test binary under the daemons' names.
func fakes(t *testing.T, behave map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range daemons() {
		if err := os.Symlink(exe, filepath.Join(dir, d)); err != nil {
			t.Fatal(err)
		}
	}
	for name, how := range behave {
		if err := os.WriteFile(filepath.Join(dir, "behave."+name), []byte(how), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func begin(t *testing.T, behave map[string]string, change func(*Config)) (*Cluster, error) {
	t.Helper()
	cfg := Config{Bin: fakes(t, behave), Dir: t.TempDir(), Ctx: 1, Gen: 1, Grace: time.Millisecond, Logger: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&cfg)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return Start(ctx, cfg)
}

func TestStartGivesEveryDaemonItsOptionsAndStopEndsAll(t *testing.T) {
	t.Setenv("MERIDIAN_NAME", "inherited")
	c, err := begin(t, nil, func(cfg *Config) {
		cfg.Schedules, cfg.Model, cfg.Device = []string{"generation_first", "aggregated"}, "/m", "sim"
	})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]string{
		"router":            {"--embedded-nats", "--schedule generation_first"},
		"router-aggregated": {"--nats nats://", "--schedule aggregated"},
		"ctx0":              {"--kv-listen 127.0.0.1:", "--model /m", "--device sim", "--spool"},
		"gen0":              {"--name gen0", "--model /m"},
		"clocksync":         {"--nats nats://"},
	}
	for name, options := range want {
		p := c.Find(name)
		if p == nil || !p.Running() || p.PID() == 0 {
			t.Errorf("%s does not run", name)
			continue
		}
		for _, o := range options {
			if log := p.LogTail(5); !strings.Contains(log, o) || strings.Contains(log, "inherited") {
				t.Errorf("%s was started with %q, want %q in it and no environment of ours", name, log, o)
			}
		}
	}
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
	for _, p := range c.All() {
		if p.Running() {
			t.Errorf("%s still runs", p.Name)
		}
	}
}

// TestDaemonsThatAreApartHearNoSignalsOfATerminal: one that got a second signal from Stop would be killed by it while it drains.
func TestDaemonsThatAreApartHearNoSignalsOfATerminal(t *testing.T) {
	for _, apart := range []bool{false, true} {
		c, err := begin(t, nil, func(cfg *Config) { cfg.Apart = apart })
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range c.All() {
			group, err := syscall.Getpgid(p.PID())
			if err != nil || (group != syscall.Getpgrp()) != apart {
				t.Errorf("apart %v: %s is in group %d, we are in %d, %v", apart, p.Name, group, syscall.Getpgrp(), err)
			}
		}
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	}
}

func TestAStartThatFailsLeavesNothingAndShowsTheLog(t *testing.T) {
	_, err := begin(t, map[string]string{"gennode": "refuse"}, nil)
	if err == nil || !strings.Contains(err.Error(), "gen0 ended before it was ready") || !strings.Contains(err.Error(), "I will not") {
		t.Errorf("error %v", err)
	}
}

func TestAPortThatIsTakenIsRefused(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go http.Serve(l, http.NotFoundHandler()) // ends with l
	defer l.Close()
	c, err := begin(t, nil, func(cfg *Config) { cfg.Port = l.Addr().(*net.TCPAddr).Port })
	if err == nil {
		c.Stop()
	}
	if err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("error %v does not name %s", err, l.Addr())
	}
}

func TestStopNamesWhoDidNotEndWell(t *testing.T) {
	for how, want := range map[string]string{"sick": "exit status 4", "deaf": "was killed"} {
		c, err := begin(t, map[string]string{"ctxnode": how}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Stop(); err == nil || !strings.Contains(err.Error(), "ctx0") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want ctx0 and %q", how, err, want)
		}
	}
}

func TestWhoWasKilledByItsUserEndedAsItWasTold(t *testing.T) {
	c, err := begin(t, nil, func(cfg *Config) { cfg.NoClocksync = true })
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range c.Nodes {
		if err := p.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Stop(); err != nil { // mostly before the ends are noticed
		t.Error(err)
	}
}

func TestAKilledProcessCanBeStartedAgain(t *testing.T) {
	c, err := begin(t, nil, func(cfg *Config) { cfg.NoClocksync = true })
	if err != nil {
		t.Fatal(err)
	}
	p := c.Find("gen0")
	if err := c.Restart(t.Context(), p); err == nil {
		t.Error("a running process was started again")
	}
	old := p.PID()
	if err := p.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(t.Context()); err == nil {
		t.Error("a killed process ended well")
	}
	if err := c.Restart(t.Context(), p); err != nil || p.PID() == old {
		t.Errorf("pid %d again, %v", p.PID(), err)
	}
	if err := c.Stop(); err != nil {
		t.Error(err)
	}
}

func TestMissingBinariesAreNamed(t *testing.T) {
	t.Setenv("MERIDIAN_TEST_BIN", t.TempDir())
	if _, err := Binaries(); err == nil || !strings.Contains(err.Error(), "router") || !strings.Contains(err.Error(), "make build") {
		t.Errorf("error %v", err)
	}
}
