package truth

import (
	"container/heap"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// path is one direction of the shuttle.
type path struct {
	delay, jitter time.Duration
	loss          float64
}

// shuttle carries packets between two network namespaces and delays them, where the kernel has no netem.
func shuttle(t *testing.T, nsA, nsB string, fwd, rev path) {
	t.Helper()
	a, b := openTun(t, "mtuna"), openTun(t, "mtunb")
	for _, x := range []struct{ dev, ns, own, peer string }{
		{"mtuna", nsA, "10.77.0.1", "10.77.0.2"}, {"mtunb", nsB, "10.77.0.2", "10.77.0.1"},
	} {
		sh(t, "ip", "link", "set", x.dev, "netns", x.ns)
		sh(t, "ip", "-n", x.ns, "addr", "add", x.own, "peer", x.peer, "dev", x.dev)
		sh(t, "ip", "-n", x.ns, "link", "set", x.dev, "up")
	}
	var wg sync.WaitGroup
	wg.Go(func() { pump(a, b, fwd, 1) })
	wg.Go(func() { pump(b, a, rev, 2) })
	t.Cleanup(func() {
		a.Close()
		b.Close()
		wg.Wait()
	})
}

func openTun(t *testing.T, name string) *os.File {
	t.Helper()
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("no TUN device: %v", err)
	}
	req, err := unix.NewIfreq(name)
	if err != nil {
		t.Fatal(err)
	}
	req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		unix.Close(fd)
		t.Skipf("no TUN interface: %v", err)
	}
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fd), name)
}

type parcel struct {
	due time.Time
	b   []byte
}

type parcels []parcel

func (q parcels) Len() int           { return len(q) }
func (q parcels) Less(i, j int) bool { return q[i].due.Before(q[j].due) }
func (q parcels) Swap(i, j int)      { q[i], q[j] = q[j], q[i] }
func (q *parcels) Push(x any)        { *q = append(*q, x.(parcel)) }
func (q *parcels) Pop() any {
	o := *q
	x := o[len(o)-1]
	*q = o[:len(o)-1]
	return x
}

// pump reads from in and writes to out when each packet is due, until in is closed.
func pump(in, out *os.File, p path, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 7))
	arrivals := make(chan parcel, 1024)
	done := make(chan struct{})
	go func() {
		defer close(done)
		deliver(arrivals, out)
	}()
	buf := make([]byte, 65536)
	for {
		n, err := in.Read(buf)
		if err != nil {
			close(arrivals)
			<-done
			return
		}
		if r.Float64() >= p.loss {
			d := p.delay + time.Duration(r.ExpFloat64()*float64(p.jitter))
			arrivals <- parcel{time.Now().Add(d), append([]byte(nil), buf[:n]...)}
		}
	}
}

func deliver(arrivals <-chan parcel, out *os.File) {
	var q parcels
	for {
		wait := time.Hour
		if len(q) > 0 {
			wait = time.Until(q[0].due)
		}
		if wait <= 0 {
			_, _ = out.Write(heap.Pop(&q).(parcel).b)
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case p, open := <-arrivals:
			if !open {
				return
			}
			heap.Push(&q, p)
		case <-timer.C:
		}
		timer.Stop()
	}
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
