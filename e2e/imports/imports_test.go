package imports

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const prefix = "meridian.internal/"

// rules say which siblings a module may depend on, tests not counted. A sibling without "/" allows the whole module.
func rules() map[string][]string {
	return map[string][]string{
		"shared":    {},
		"clocksync": {"shared"},
		// The engine knows no HTTP and no NATS: of shared it has only the pure packages.
		"gpu":     {"shared/clock", "shared/token", "shared/blockhash", "shared/rows", "shared/kvevent", "shared/infer", "shared/jsonline", "shared/bytesize"},
		"ctxnode": {"shared", "clocksync", "gpu"},
		"gennode": {"shared", "clocksync", "gpu"},
		"router":  {"shared", "clocksync"},
		"e2e":     {"shared"},
	}
}

func TestModulesImportOnlyWhatTheyMay(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	for module, allowed := range rules() {
		t.Run(module, func(t *testing.T) {
			cmd := exec.CommandContext(t.Context(), "go", "list", "-deps", "./...")
			cmd.Dir, cmd.Env = filepath.Join(root, module), append(os.Environ(), "GOWORK=off")
			out, err := cmd.Output()
			if err != nil {
				t.Fatalf("go list: %v", err)
			}
			for _, dep := range strings.Fields(string(out)) {
				if p, ours := strings.CutPrefix(dep, prefix); ours && !permitted(p, module, allowed) {
					t.Errorf("%s depends on %s", module, dep)
				}
			}
		})
	}
}

func permitted(pkg, module string, allowed []string) bool {
	if strings.HasPrefix(pkg+"/", module+"/") {
		return true
	}
	for _, a := range allowed {
		if strings.HasPrefix(pkg+"/", a+"/") {
			return true
		}
	}
	return false
}
