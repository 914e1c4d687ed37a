package clock

import (
	"fmt"
	"hash/fnv"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

func kernelMono() (int64, error) { return kernelTime(unix.CLOCK_MONOTONIC, "CLOCK_MONOTONIC") }
func kernelBoot() (int64, error) { return kernelTime(unix.CLOCK_BOOTTIME, "CLOCK_BOOTTIME") }
func kernelRaw() (int64, error)  { return kernelTime(unix.CLOCK_MONOTONIC_RAW, "CLOCK_MONOTONIC_RAW") }

// kernelTime never blocks, so the scheduler is not told of the call: telling it wakes the runtime's monitor from its sleep.
func kernelTime(id int32, name string) (int64, error) {
	var ts unix.Timespec
	if _, _, errno := unix.RawSyscall(unix.SYS_CLOCK_GETTIME, uintptr(id), uintptr(unsafe.Pointer(&ts)), 0); errno != 0 {
		return 0, fmt.Errorf("read %s: %w", name, errno)
	}
	return ts.Nano(), nil
}

// facts are what makes a steady clock this clock. Processes that read the same facts read the same clock if they also run
// on one kernel, which the facts alone do not prove: machines cloned from one snapshot share a boot id.
type facts struct {
	bootID, timeNS, timeNSOffsets, clocksource, fault string
}

func readFacts() (facts, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return facts{}, fmt.Errorf("read the boot id of the clock epoch: %w", err)
	}
	f := facts{bootID: strings.TrimSpace(string(boot))}
	// Absent on kernels without time namespaces or in a masked /proc: then everything lives in the one namespace.
	f.timeNS, _ = os.Readlink("/proc/self/ns/time")
	offsets, _ := os.ReadFile("/proc/self/timens_offsets")
	f.timeNSOffsets = strings.Join(strings.Fields(string(offsets)), " ")
	source, _ := os.ReadFile("/sys/devices/system/clocksource/clocksource0/current_clocksource")
	f.clocksource = strings.TrimSpace(string(source))
	return f, nil
}

func (f facts) hash(suspend int64) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\n%s\n%s\n%s\n%s\n%d\n", f.bootID, f.timeNS, f.timeNSOffsets, f.clocksource, f.fault, suspend)
	return mix(h.Sum64())
}

// mix spreads the bits (the finalizer of MurmurHash3), so that similar facts give dissimilar epochs.
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}
