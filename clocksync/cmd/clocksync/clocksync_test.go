package main

import (
	"context"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"meridian.internal/clocksync/service"
)

func TestWorkersAreReadFromNamesAndURLs(t *testing.T) {
	for in, want := range map[string]service.Worker{
		"http://h:1":         {Name: "h:1", URL: "http://h:1"},
		"w=http://h:1":       {Name: "w", URL: "http://h:1"},
		"https://h:1/a?b=c":  {Name: "h:1/a?b=c", URL: "https://h:1/a?b=c"},
		"gen 0=https://h:80": {Name: "gen 0", URL: "https://h:80"},
	} {
		got, err := parseWorkers([]string{in})
		if err != nil || len(got) != 1 || got[0] != want {
			t.Errorf("%q: %+v %v, want %+v", in, got, err, want)
		}
	}
	for _, in := range []string{"h:1", "w=h:1", "http://", "w=", "=", "http:///x", "w=http://h:port", "ftp://h:1", "http://h :1"} {
		if _, err := parseWorkers([]string{in}); err == nil || !strings.Contains(err.Error(), "--worker") {
			t.Errorf("%q: error %v", in, err)
		}
	}
}

func FuzzParseWorkers(f *testing.F) {
	f.Add("w=http://h:1")
	f.Add("")
	f.Fuzz(func(t *testing.T, in string) {
		ws, err := parseWorkers([]string{in})
		if err == nil && (len(ws) != 1 || ws[0].Name == "" || !strings.HasPrefix(strings.ToLower(ws[0].URL), "http")) {
			t.Fatalf("%q gave %+v", in, ws)
		}
	})
}

func TestAKeyFileHoldsALongEnoughKey(t *testing.T) {
	dir := t.TempDir()
	good, short := filepath.Join(dir, "good"), filepath.Join(dir, "short")
	for path, text := range map[string]string{good: "0123456789abcdef\n", short: "secret\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if key, err := readKey(good); err != nil || string(key) != "0123456789abcdef" {
		t.Errorf("key %q %v", key, err)
	}
	if key, err := readKey(""); err != nil || key != nil {
		t.Errorf("no file: %q %v", key, err)
	}
	for _, path := range []string{short, filepath.Join(dir, "absent")} {
		if _, err := readKey(path); err == nil || !strings.Contains(err.Error(), "--clock-key-file") {
			t.Errorf("%s: error %v", path, err)
		}
	}
}

func TestBadOptionsAreRefusedByName(t *testing.T) {
	good := serveCmd{Nats: "nats://127.0.0.1:1", Listen: "127.0.0.1:0", ClockRho: 200, ClockEta: 0.1, Burst: 4, NTPEvery: 64e9, Name: "x"}
	for want, spoil := range map[string]func(*serveCmd){
		"--clock-rho": func(c *serveCmd) { c.ClockRho = -1 },
		"--clock-eta": func(c *serveCmd) { c.ClockEta = 0 },
		"--burst":     func(c *serveCmd) { c.Burst = 0 },
		"--ntp-every": func(c *serveCmd) { c.NTPEvery = 1 },
		"--worker":    func(c *serveCmd) { c.Worker = []string{"x"} },
		"--listen":    func(c *serveCmd) { c.Listen = "nonsense" },
		"--clock-key": func(c *serveCmd) { c.ClockKeyFile = "/nonexistent" },
	} {
		c := good
		spoil(&c)
		if err := c.Run(t.Context(), slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v", want, err)
		}
	}
}

func TestTheDaemonStopsWhenItsContextEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	c := serveCmd{Nats: "nats://127.0.0.1:1", Listen: "127.0.0.1:0", ClockRho: 200, ClockEta: 0.1, Burst: 4, NTPEvery: 64e9, Name: "x"}
	if err := c.Run(ctx, slog.New(slog.DiscardHandler)); err != nil {
		t.Error(err)
	}
}

// The module may import shared and no other module of ours.
func TestImportsStayWithinTheRules(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-test", "meridian.internal/clocksync/...").CombinedOutput()
	if err != nil {
		t.Skipf("go list does not run here: %v: %s", err, out)
	}
	for line := range strings.FieldsSeq(string(out)) {
		if rest, ours := strings.CutPrefix(line, "meridian.internal/"); ours && !strings.HasPrefix(rest, "shared") && !strings.HasPrefix(rest, "clocksync") {
			t.Errorf("clocksync imports %s", line)
		}
	}
}
