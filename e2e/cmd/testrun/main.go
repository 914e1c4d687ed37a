// Command testrun runs "go test" and says how many tests ran, failed and were skipped, and why they were skipped. It
// passes its arguments on, adds -count=1, and exits as go test does. It owns no test.
package main

import (
	"fmt"
	"os"
	"os/exec"
)

func main() {
	code, err := run(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		code = 2
	}
	os.Exit(code)
}

func run(args []string) (int, error) {
	cmd := exec.Command("go", append([]string{"test", "-json", "-count=1"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start go test: %w", err)
	}
	t := newTally(os.Stdout)
	readErr := t.read(out)
	waitErr := cmd.Wait()
	t.summary()
	if readErr != nil {
		return 0, fmt.Errorf("read go test's output: %w", readErr)
	}
	if waitErr != nil || t.failed > 0 || t.brokenPackages > 0 {
		return 1, nil
	}
	return 0, nil
}
