package truth

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"

	"meridian.internal/shared/shuttle"
)

// connect carries packets between two network namespaces.
func connect(t *testing.T, nsA, nsB string, there, back shuttle.Path) {
	t.Helper()
	var files []*os.File
	devA, devB := fmt.Sprintf("mt%da", os.Getpid()), fmt.Sprintf("mt%db", os.Getpid()) // another process may have devices too
	for _, x := range []struct{ dev, ns, own, peer string }{
		{devA, nsA, "10.77.0.1", "10.77.0.2"}, {devB, nsB, "10.77.0.2", "10.77.0.1"},
	} {
		f, err := shuttle.Open(x.dev)
		if err != nil {
			t.Skip(err)
		}
		files = append(files, f)
		sh(t, "ip", "link", "set", x.dev, "netns", x.ns)
		sh(t, "ip", "-n", x.ns, "addr", "add", x.own, "peer", x.peer, "dev", x.dev)
		sh(t, "ip", "-n", x.ns, "link", "set", x.dev, "up")
	}
	t.Cleanup(shuttle.Start(files[0], files[1], there, back))
}

// sh runs a command that must work.
func sh(t testing.TB, a ...string) {
	t.Helper()
	if out, err := exec.Command(a[0], a[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", a, err, out)
	}
}

// try runs a command and says why it does not work here.
func try(a ...string) error {
	out, err := exec.Command(a[0], a[1:]...).CombinedOutput()
	if err != nil {
		return errors.New(fmt.Sprint(a, ": ", err, ": ", string(out)))
	}
	return nil
}

// netns makes a network namespace for the length of the test.
func netns(t *testing.T, name string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("network namespaces need root")
	}
	name = fmt.Sprintf("m%d%s", os.Getpid(), name)
	if err := try("ip", "netns", "add", name); err != nil {
		t.Skipf("no network namespaces: %v", err)
	}
	t.Cleanup(func() { _ = try("ip", "netns", "del", name) })
	sh(t, "ip", "-n", name, "link", "set", "lo", "up")
	return name
}
