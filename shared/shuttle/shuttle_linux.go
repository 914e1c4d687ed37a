// Package shuttle carries packets between two TUN devices and delays them: a network path whose delay, jitter and loss are
// known, in each direction its own, where the kernel has no netem. Tests and localcluster hold clocks against it. It needs
// root. It knows nothing of what the packets are, and sets up neither addresses nor namespaces.
package shuttle

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Path is one direction.
type Path struct {
	Delay  time.Duration
	Jitter time.Duration // mean of an exponential addition
	Loss   float64       // share of packets that are lost
}

// Open makes a TUN device; it goes when the file is closed.
func Open(device string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun for %s: %w", device, err)
	}
	req, err := unix.NewIfreq(device)
	if err == nil {
		req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, req)
	}
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("make TUN device %s: %w", device, err)
	}
	return os.NewFile(uintptr(fd), device), nil
}

// Start carries packets from a to b and back until stop, which closes both.
func Start(a, b *os.File, there, back Path) (stop func()) {
	var wg sync.WaitGroup
	wg.Go(func() { pump(a, b, there, 1) })
	wg.Go(func() { pump(b, a, back, 2) })
	return func() {
		a.Close()
		b.Close()
		wg.Wait()
	}
}

type parcel struct {
	due time.Time
	b   []byte
}

// parcels is a heap: the next due comes first.
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
func pump(in, out *os.File, p Path, seed uint64) {
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
		if r.Float64() >= p.Loss {
			d := p.Delay + time.Duration(r.ExpFloat64()*float64(p.Jitter))
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
				timer.Stop()
				return
			}
			heap.Push(&q, p)
		case <-timer.C:
		}
		timer.Stop()
	}
}
