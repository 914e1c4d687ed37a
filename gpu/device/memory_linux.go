package device

import "golang.org/x/sys/unix"

// machineMemory is what the machine has, swap included, in bytes; 0: not known.
func machineMemory() float64 {
	var i unix.Sysinfo_t
	if unix.Sysinfo(&i) != nil {
		return 0
	}
	return (float64(i.Totalram) + float64(i.Totalswap)) * float64(i.Unit)
}
