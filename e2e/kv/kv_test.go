package kv

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"meridian.internal/e2e/clustertest"
)

// shapes are models beside the embedded one: layers that all have a window, as Mistral's, and five with a window to one without,
// as Gemma 3's.
var shapes = map[string]string{
	"mistral": `"architectures": ["MistralForCausalLM"], "sliding_window": 100, "num_hidden_layers": 3`,
	"gemma": `"architectures": ["Qwen3ForCausalLM"], "use_sliding_window": true, "sliding_window": 100, "num_hidden_layers": 6, "layer_types": ["sliding_attention",
		"sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]`,
}

// checkpoint writes one of a shape with random weights.
func checkpoint(t *testing.T, bin, shape string) string {
	t.Helper()
	dir := t.TempDir()
	config := filepath.Join(dir, "config.json")
	text := "{" + shapes[shape] + `, "vocab_size": 2048, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
		"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000, "tie_word_embeddings": true, "torch_dtype": "float32"}`
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "model")
	if b, err := exec.CommandContext(t.Context(), filepath.Join(bin, "randmodel"), "--shape", config, "--out", out).CombinedOutput(); err != nil {
		t.Fatalf("randmodel: %v\n%s", err, b)
	}
	return out
}

// verified is what localcluster verify says in its last line.
type verified struct{ Cases, Equal int }

// verify compares texts of all styles on nodes that reuse KV and have room for few prompts on their devices, more in the host's
// memory, and all on disk. It returns the folder of the timelines.
func verify(t *testing.T, bin, model, disk string) string {
	t.Helper()
	run := t.TempDir()
	args := []string{"verify", "--prefix-reuse", "--cases=20", "--concurrency=8", "--json", "--dir=" + run, "--node-flag=all=--kv-blocks=120", "--node-flag=all=--kv-host-memory=64MiB", "--node-flag=all=--iter-publish"}
	for _, node := range []string{"ctx0", "gen0"} {
		args = append(args, fmt.Sprintf("--node-flag=%s=--kv-disk=%s 1GiB", node, filepath.Join(disk, node)))
	}
	if model != "" {
		args = append(args, "--model="+model)
	}
	cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "localcluster"), args...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	var v verified
	if err == nil {
		err = json.Unmarshal(lines[len(lines)-1], &v)
	}
	if err != nil || v.Cases != 20 || v.Equal != 20 {
		t.Fatalf("%d of %d texts are equal, %v\n%.4000s\n%.4000s", v.Equal, v.Cases, err, out, said.Bytes())
	}
	return filepath.Join(run, "traces")
}

// loads counts the blocks that host memory and disk gave to the requests of three routers, whose timelines must be without a
// violation: of causality, of sums, of the conservation of blocks.
func loads(t *testing.T, bin, traces string) (host, disk int) {
	t.Helper()
	var files []string
	for _, router := range []string{".", "router-context_first", "router-aggregated"} {
		found, err := filepath.Glob(filepath.Join(traces, router, "timeline-*.jsonl"))
		if err != nil || len(found) == 0 {
			t.Fatalf("no timelines in %s of %s: %v", router, traces, err)
		}
		files = append(files, found...)
		rows, _ := filepath.Glob(filepath.Join(traces, router, "*.rows.ndjson")) // the pattern is a good one
		for _, f := range rows {
			if router != "." { // each router has written the rows of all nodes
				if err := os.Remove(f); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if out, err := exec.CommandContext(t.Context(), filepath.Join(bin, "timeline"), append([]string{"check"}, files...)...).CombinedOutput(); err != nil {
		t.Errorf("timeline check: %v\n%.3000s", err, out)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(b) {
			var l struct {
				Phases []struct {
					Tiers [2]int `json:"kv_tier_blocks"`
				}
			}
			if err := json.Unmarshal(line, &l); err != nil {
				t.Fatal(err)
			}
			for _, p := range l.Phases {
				host, disk = host+p.Tiers[0], disk+p.Tiers[1]
			}
		}
	}
	return host, disk
}

// TestTextsAreTheSameFromEveryTier runs the same prompts twice: on new nodes, and on nodes that find on disk what the first
// have left.
func TestTextsAreTheSameFromEveryTier(t *testing.T) {
	bin := clustertest.Binaries(t)
	for _, name := range []string{"embedded", "mistral", "gemma"} {
		t.Run(name, func(t *testing.T) {
			model, disk := "", t.TempDir()
			if name != "embedded" {
				model = checkpoint(t, bin, name)
			}
			first, _ := loads(t, bin, verify(t, bin, model, disk))
			again, kept := loads(t, bin, verify(t, bin, model, disk))
			t.Logf("blocks from host memory %d and %d; from the disk of the nodes before %d", first, again, kept)
			if kept == 0 || first+again == 0 && name != "mistral" { // whose windows may all fit on the device
				t.Errorf("%d blocks from host memory, %d from disk: the test proves less than it should", first+again, kept)
			}
		})
	}
}
