//go:build cuda

package cuda

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

// compilerOf skips where there is no compiler; a card is not needed.
func compilerOf(t *testing.T) *compiler {
	t.Helper()
	c, err := openCompiler()
	if errors.Is(err, ErrUnavailable) {
		t.Skipf("no compiler of kernels: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestKernelsCompileForEveryKindOfCard compiles for shapes that take each condition of the source, and sees that every
// kernel that the host would launch is there and that none spills registers to memory.
func TestKernelsCompileForEveryKindOfCard(t *testing.T) {
	c := compilerOf(t)
	shapes := map[string]string{
		"heads of 64":        bench1B,
		"heads of 128":       strings.NewReplacer(`"head_dim": 64`, `"head_dim": 128`, `"num_attention_heads": 32`, `"num_attention_heads": 16`).Replace(bench1B),
		"heads of 48":        strings.Replace(bench1B, `"head_dim": 64`, `"head_dim": 48`, 1),
		"a group of sixteen": strings.Replace(bench1B, `"num_key_value_heads": 8`, `"num_key_value_heads": 2`, 1),
	}
	for name, shape := range shapes {
		for _, arch := range []int{80, 90} {
			for _, kv := range []string{"bf16", "f8e4m3", "f32"} {
				narrow := name == "heads of 64"
				t.Run(fmt.Sprintf("%s, sm_%d, %s", name, arch, kv), func(t *testing.T) {
					t.Parallel()
					m, err := model.ParseConfig([]byte(shape))
					if err != nil {
						t.Fatal(err)
					}
					f := featuresOf(arch, m, kv, kv != "f32" && narrow)
					option := fmt.Sprintf("--gpu-architecture=sm_%d", arch)
					if f.hopper {
						option += "a"
					}
					info := backend.Info{KVType: kv, TokensPerBlock: 32, Stage: backend.Stage{End: m.Layers}}
					code, log, err := c.compile(source(m, info, f), option, "--std=c++17", "--ptxas-options=-v")
					if err != nil {
						t.Fatal(err)
					}
					for kernel := range f.names(m.HeadSize) {
						if !strings.Contains(string(code), kernel+"\x00") {
							t.Errorf("no kernel %s", kernel)
						}
					}
					if os.Getenv("MERIDIAN_KERNEL_LOG") != "" {
						t.Log(log)
					}
				})
			}
		}
	}
}

func TestTheCacheGivesBackWhatWasCompiledAndSeesATornFile(t *testing.T) {
	c, dir := compilerOf(t), t.TempDir()
	const source, option = `extern "C" __global__ void f(int* p) { *p = 1; }`, "--gpu-architecture=sm_80"
	first, err := c.cached(dir, source, option, "driver 1")
	if err != nil {
		t.Fatal(err)
	}
	files := func() []string {
		names, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil {
			t.Fatal(err)
		}
		return names
	}
	if n := len(files()); n != 1 {
		t.Fatalf("%d files in the cache after one source", n)
	}
	path := files()[0]
	if _, err := c.cached(dir, source, option, "driver 2"); err != nil || len(files()) != 2 {
		t.Errorf("another driver: %v, %d files; want 2", err, len(files()))
	}
	kept, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	keepFile(path, []byte("marked")) // what the cache holds is what comes back
	if got, err := c.cached(dir, source, option, "driver 1"); err != nil || string(got) != "marked" {
		t.Errorf("got %q, %v; the cache was not asked", got, err)
	}
	if err := os.WriteFile(path, kept[:len(kept)/2], 0o644); err != nil {
		t.Fatal(err)
	}
	if got, err := c.cached(dir, source, option, "driver 1"); err != nil || len(got) != len(first) {
		t.Errorf("from a torn file: %d bytes, %v; want %d", len(got), err, len(first))
	}
}
