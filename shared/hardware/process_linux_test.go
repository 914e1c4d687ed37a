package hardware

import "testing"

func FuzzProc(f *testing.F) {
	f.Add([]byte("VmRSS:\t  12 kB\nVmLck:\t0 kB\nVmPin: 4 kB\nThreads:\t9\n"), []byte(" lo: 1 2\neth0: 10 0 0 0 0 0 0 0 20 0\n"))
	f.Fuzz(func(t *testing.T, status, net []byte) {
		var n Sample
		parseStatus(status, &n)
		parseNet(net, &n)
	})
}
