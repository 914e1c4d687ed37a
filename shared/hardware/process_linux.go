package hardware

import (
	"bytes"
	"os"
	"strconv"
	"syscall"

	"meridian.internal/shared/rows"
)

// readProcess reads what Linux says of this process.
func readProcess(n *Sample) {
	var use syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &use) == nil {
		ns := use.Utime.Nano() + use.Stime.Nano()
		n.CPU = rows.Ratio{V: float64(ns) / 1e9, OK: true}
	}
	if b, err := os.ReadFile("/proc/self/status"); err == nil {
		parseStatus(b, n)
	}
	if b, err := os.ReadFile("/proc/self/net/dev"); err == nil {
		parseNet(b, n)
	}
	if names, err := os.ReadDir("/proc/self/fd"); err == nil {
		n.OpenFiles = rows.Some(len(names) - 1) // without the one that reads the folder
	}
}

// parseStatus reads the lines "Key:  number [kB]" of /proc/self/status.
func parseStatus(b []byte, n *Sample) {
	var locked, pinned rows.Int
	for line := range bytes.Lines(b) {
		key, rest, ok := bytes.Cut(line, []byte(":"))
		fields := bytes.Fields(rest)
		if !ok || len(fields) == 0 {
			continue
		}
		var to *rows.Int
		switch string(key) {
		case "VmRSS":
			to = &n.RSS
		case "VmHWM":
			to = &n.PeakRSS
		case "VmLck":
			to = &locked
		case "VmPin":
			to = &pinned
		case "Threads":
			to = &n.Threads
		default:
			continue
		}
		v, err := strconv.ParseInt(string(fields[0]), 10, 64)
		if err != nil {
			continue
		}
		if len(fields) > 1 && string(fields[1]) == "kB" {
			v <<= 10
		}
		*to = rows.Some(v)
	}
	if locked.OK && pinned.OK {
		n.Pinned = rows.Some(locked.V + pinned.V)
	}
}

// parseNet sums the interfaces of /proc/self/net/dev: "name: bytes received, 7 more, bytes sent, ...".
func parseNet(b []byte, n *Sample) {
	var read, written int64
	for line := range bytes.Lines(b) {
		name, rest, ok := bytes.Cut(line, []byte(":"))
		fields := bytes.Fields(rest)
		if !ok || len(fields) < 9 || string(bytes.TrimSpace(name)) == "lo" {
			continue
		}
		r, err1 := strconv.ParseInt(string(fields[0]), 10, 64)
		w, err2 := strconv.ParseInt(string(fields[8]), 10, 64)
		if err1 != nil || err2 != nil {
			return
		}
		read, written = read+r, written+w
	}
	n.NetRead, n.NetWritten = rows.Some(read), rows.Some(written)
}
