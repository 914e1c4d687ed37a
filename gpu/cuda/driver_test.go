//go:build cuda

package cuda

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestEveryFunctionThatIsCalledIsLookedUp: calling one that was not would jump to address 0.
func TestEveryFunctionThatIsCalledIsLookedUp(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil || len(files) == 0 {
		t.Skipf("the sources are not here: %v", err)
	}
	call := regexp.MustCompile(`\.(?:do|call)\("((?:cu|nvrtc)[A-Za-z0-9_]+)"`)
	called := map[string]bool{}
	for _, f := range files {
		if strings.HasSuffix(f, "_test.go") {
			continue // they look up by themselves what only they call
		}
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range call.FindAllStringSubmatch(string(b), -1) {
			called[m[1]] = true
		}
	}
	listed := slices.Concat(driverCalls, blasCalls, compilerCalls)
	for name := range called {
		if !slices.Contains(listed, name) {
			t.Errorf("%s is called, and not looked up", name)
		}
	}
	for _, name := range listed {
		if !called[name] {
			t.Errorf("%s is looked up, and never called: a library that lacks it would be refused for nothing", name)
		}
	}
}

func TestALibraryThatCannotBeUsedIsNamedWithWhatItLacks(t *testing.T) {
	if _, err := openLibrary([]string{"libmeridian-none.so.2", "libmeridian-none.so.1"}, nil); !errors.Is(err, ErrUnavailable) ||
		!strings.Contains(err.Error(), "libmeridian-none.so.2") || !strings.Contains(err.Error(), "libmeridian-none.so.1") {
		t.Errorf("a library that is not there: %v", err)
	}
	_, err := openLibrary([]string{"libmeridian-none.so.1", "libc.so.6"}, []string{"getpid", "cuNothing"})
	if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "libc.so.6 has no cuNothing") {
		t.Errorf("a library that lacks a function: %v", err)
	}
	l, err := openLibrary([]string{"libc.so.6"}, []string{"getpid"})
	if err != nil {
		t.Fatal(err)
	}
	if got := int(l.call("getpid")); got != os.Getpid() {
		t.Errorf("getpid by the library is %d, want %d", got, os.Getpid())
	}
}
