package routerbench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// ticks is USER_HZ, the unit of the kernel's CPU times in /proc; it is 100 on every Linux that Go runs on.
const ticks = 100

// cpu is the time that the subject's process and its children have used.
func (s *subject) cpu() (time.Duration, error) {
	if s.cmd == nil {
		return 0, nil
	}
	var sum time.Duration
	for _, pid := range family(s.cmd.Process.Pid) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0, fmt.Errorf("CPU time of %s: %w", s.name, err)
		}
		f := afterName(b)
		if len(f) < 13 {
			return 0, fmt.Errorf("CPU time of %s: /proc/%d/stat has %d fields", s.name, pid, len(f))
		}
		for _, field := range f[11:13] { // utime, stime
			n, err := strconv.ParseInt(field, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("CPU time of %s: %w", s.name, err)
			}
			sum += time.Duration(n) * time.Second / ticks
		}
	}
	return sum, nil
}

// afterName splits what follows the process's name, which may hold anything but ends with the last parenthesis.
func afterName(stat []byte) []string {
	_, rest, _ := strings.Cut(string(stat[max(0, bytes.LastIndexByte(stat, ')')):]), ") ")
	return strings.Fields(rest)
}

// family is a process and its direct children.
func family(pid int) []int {
	out := []int{pid}
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		for _, word := range strings.Fields(string(b)) {
			if n, err := strconv.Atoi(word); err == nil {
				out = append(out, n)
			}
		}
	}
	return out
}

// residentBytes is the memory of the subject's processes that no file backs: what grows with open streams.
func (s *subject) residentBytes() (int64, error) {
	var sum int64
	for _, pid := range family(s.cmd.Process.Pid) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return 0, fmt.Errorf("memory of %s: %w", s.name, err)
		}
		for line := range strings.Lines(string(b)) {
			value, ok := strings.CutPrefix(line, "VmRSS:")
			if !ok {
				continue
			}
			kb, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(value), "kB")), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("memory of %s: %w", s.name, err)
			}
			sum += kb << 10
		}
	}
	return sum, nil
}
