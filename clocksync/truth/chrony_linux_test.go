package truth

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"meridian.internal/clocksync/utc"
	"meridian.internal/shared/clock"
)

// ntpServer is a real chronyd that leaves the system's clock alone and tells a UTC that is scripted: off from the wall
// clock by offset, and drifting.
type ntpServer struct {
	port   int
	offset time.Duration
	ppm    float64
	t0     time.Time
}

// said is what the server tells as UTC when the wall clock shows t, minus t.
func (s ntpServer) said(t time.Time) float64 {
	return float64(s.offset) + t.Sub(s.t0).Seconds()*s.ppm*1e3
}

// start runs the server and the script that feeds its reference clock.
func (s ntpServer) start(ctx context.Context, t *testing.T, wg *sync.WaitGroup) {
	t.Helper()
	dir := t.TempDir()
	sock := filepath.Join(dir, "ref.sock")
	conf := fmt.Sprintf("refclock SOCK %s poll -2 filter 1 refid VIRT delay 1e-5 precision 1e-6\nallow 127.0.0.0/8\nport %d\n"+
		"bindaddress 127.0.0.1\ncmdport 0\npidfile %s\n", sock, s.port, filepath.Join(dir, "pid"))
	file := filepath.Join(dir, "chrony.conf")
	if err := os.WriteFile(file, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, "chronyd", "-x", "-d", "-f", file, "-u", "root")
	if err := cmd.Start(); err != nil {
		t.Skipf("chronyd does not start: %v", err)
	}
	wg.Go(func() { _ = cmd.Wait() })
	wg.Go(func() { s.feed(ctx, sock) })
}

// feed sends samples as the SOCK driver takes them: struct timeval, double offset, int pulse, leap, pad, magic.
func (s ntpServer) feed(ctx context.Context, sock string) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Now().Truncate(time.Microsecond)
		var b bytes.Buffer
		for _, v := range []any{now.Unix(), int64(now.Nanosecond() / 1000), s.said(now) * 1e-9, int32(0), int32(0), int32(0), int32(0x534f434b)} {
			_ = binary.Write(&b, binary.NativeEndian, v)
		}
		c, err := net.Dial("unixgram", sock)
		if err != nil {
			continue // not up yet
		}
		_, _ = c.Write(b.Bytes())
		c.Close()
	}
}

func TestUTCOfThreeServersOfWhichOneLiesIsCovered(t *testing.T) {
	if os.Getenv("MERIDIAN_CLOCK_TRUTH") == "" {
		t.Skip("the script that feeds chronyd is only exact on a machine without other load: run make clock-truth")
	}
	if _, err := exec.LookPath("chronyd"); err != nil {
		t.Skip("no chronyd here")
	}
	if os.Geteuid() != 0 {
		t.Skip("chronyd needs root")
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	truth := ntpServer{offset: 2500 * time.Millisecond, ppm: 40, t0: time.Now()}
	var addrs []string
	for i := range 3 {
		s := truth
		s.port = 21123 + i
		if i == 2 {
			s.offset += 50 * time.Millisecond
		}
		s.start(ctx, t, &wg)
		addrs = append(addrs, fmt.Sprintf("127.0.0.1:%d", s.port))
	}
	steady, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(12 * time.Second) // chronyd needs some samples before it tells anything
	tr := utc.New(utc.Options{Servers: addrs, Steady: steady, Every: 2 * time.Second})
	wg.Go(func() { _ = tr.Run(ctx) })
	known := 0
	for range 20 {
		time.Sleep(time.Second)
		st, ok := tr.Now()
		mono, wall, _ := steady.Wall()
		if !ok {
			continue
		}
		known++
		is := wall - mono + int64(truth.said(time.Unix(0, wall)))
		lo, up := st.LowerNS-st.OffsetNS, st.UpperNS-st.OffsetNS
		got := st.OffsetAt(mono)
		// chronyd's own filter follows the script within some µs, which it states in its dispersion.
		if is < got+lo-1000 || is > got+up+1000 {
			t.Errorf("UTC - steady is %d, stated %d [%+d, %+d] by %d servers", is, got, lo, up, st.Agree)
		}
		for _, s := range st.Servers {
			if s.Addr == addrs[2] && s.Agrees {
				t.Errorf("the liar agrees: %+v", s)
			}
		}
		if known == 15 {
			t.Logf("error %d ns, bound %d ns, %d agree", got-is, st.Bound, st.Agree)
		}
	}
	if known < 10 {
		st, _ := tr.Now()
		t.Errorf("UTC was known in %d of 20 s: %+v", known, st.Servers)
	}
}
