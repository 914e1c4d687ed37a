package sim

import (
	"fmt"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// timer is one of the kernel, for which the runtime waits as it does for sockets. The runtime's own timers end with its wait for
// sockets when there is nothing else to do, and that counts in whole milliseconds.
//
// The kernel wakes a processor that sleeps late too, and always about as late. So the timer is set earlier by that, and the rest is
// waited for while others may run.
type timer struct {
	fd   int
	file *os.File      // of fd
	late time.Duration // mean of the latest sleeps
}

func newTimer() (*timer, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create a timer: %w", err)
	}
	return &timer{fd: fd, file: os.NewFile(uintptr(fd), "timer")}, nil
}

// The rest of a sleep takes no more of a processor than a sixteenth, nor longer than the wake-up of a sleeping processor may take.
const (
	restShare = 16
	restMax   = 100 * time.Microsecond
)

// sleep waits so long, more than 0.
func (t *timer) sleep(d time.Duration) {
	begin := time.Now()
	set := d - min(2*t.late, d/restShare, restMax)
	if err := t.wait(set); err != nil { // it lasts as long in any case
		time.Sleep(d - time.Since(begin))
		return
	}
	t.late += (time.Since(begin) - set - t.late) / 8
	for time.Since(begin) < d {
		runtime.Gosched()
	}
}

// wait sleeps until the kernel's timer fires.
func (t *timer) wait(d time.Duration) error {
	if err := unix.TimerfdSettime(t.fd, 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(int64(max(d, 1)))}, nil); err != nil {
		return err
	}
	var expirations [8]byte
	_, err := t.file.Read(expirations[:])
	return err
}

func (t *timer) close() error { return t.file.Close() }
