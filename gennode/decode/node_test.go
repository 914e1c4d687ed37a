package decode

import (
	"log/slog"
	"os/exec"
	"strings"
	"testing"
	"time"

	"meridian.internal/shared/worker"
)

func TestOptionsAreRefusedByName(t *testing.T) {
	for _, c := range []struct {
		want string
		edit func(*CLI)
	}{
		{"--pp 0", func(c *CLI) { c.Device.PP = 0 }},
		{"--listen", func(c *CLI) { c.Listen = "nowhere" }},
		{"--clock-listen", func(c *CLI) { c.ClockListen = "nowhere:x" }},
		{"--model", func(c *CLI) { c.Device.Model = "/no/such/folder" }},
		{"--kv-listen", func(c *CLI) { c.KVListen, c.Device.Model = "nowhere", "/no/such/folder" }}, // before the model is looked at
		{"--nats", func(c *CLI) { c.NATS = "nonsense" }},
	} {
		o := &CLI{Listen: "127.0.0.1:0", Flags: worker.Flags{Name: "gen0", Grace: time.Second, LedgerFlags: worker.LedgerFlags{IterStatsMax: 1}}, Device: options("sim", 16)}
		c.edit(o)
		if err := o.Run(t.Context(), slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("got %v, want %s", err, c.want)
		}
	}
}

func TestAnUnknownRegistryKnowsNobody(t *testing.T) {
	if registered(nil, "127.0.0.1:1") {
		t.Error("without a registry every address is foreign")
	}
}

func TestTheNodeImportsNoOtherRole(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../...").Output()
	if err != nil {
		t.Skip("the go command does not run: " + err.Error())
	}
	for line := range strings.Lines(string(out)) {
		for _, bad := range []string{"meridian.internal/router", "meridian.internal/ctxnode", "meridian.internal/e2e"} {
			if strings.HasPrefix(line, bad) {
				t.Errorf("gennode depends on %s", strings.TrimSpace(line))
			}
		}
	}
}
