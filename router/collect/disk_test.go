package collect

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	dto "github.com/prometheus/client_model/go"

	"meridian.internal/shared/phase"
)

// smallDisk mounts a file system of a few pages; full takes all of it, free gives it back.
func smallDisk(t *testing.T) (dir string, full, free func()) {
	t.Helper()
	dir = t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=128k,nr_inodes=64"); err != nil {
		t.Skipf("a file system cannot be mounted here: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	filler := filepath.Join(dir, "filler")
	full = func() {
		if err := os.WriteFile(filler, bytes.Repeat([]byte{1}, 1<<20), 0o600); err == nil {
			t.Fatal("the disk is not full")
		}
	}
	return dir, full, func() { os.Remove(filler) }
}

func (c *Collector) failingNow(t *testing.T) bool {
	t.Helper()
	var m dto.Metric
	if err := c.metrics.failing.Write(&m); err != nil {
		t.Fatal(err)
	}
	return m.GetGauge().GetValue() == 1
}

func TestAFullDiskDelaysLinesAndLosesNone(t *testing.T) {
	dir, full, free := smallDisk(t)
	synctest.Test(t, func(t *testing.T) {
		c, stop := start(t, Options{Dir: dir})
		var acks []*fakeAck
		send := func(id string, roles ...phase.Role) {
			for _, role := range roles {
				a := &fakeAck{dir: dir}
				acks = append(acks, a)
				c.in <- message{rec: rec(role, id), ack: a}
			}
		}
		acked := func() (n int) {
			for _, a := range acks {
				if a.seen() > 0 {
					n++
				}
			}
			return n
		}
		send("before", phase.Ctx, phase.Gen, phase.Disagg)
		time.Sleep(time.Second)
		full()
		for i := range 20 {
			send(fmt.Sprintf("full-%d", i), phase.Ctx, phase.Gen, phase.Disagg)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if !c.failingNow(t) || acked() != 3 {
			t.Errorf("full disk: alarm %v, %d records acknowledged, want the 3 of before", c.failingNow(t), acked())
		}
		if _, ok := c.Find("full-7"); !ok {
			t.Error("a line that waits for the disk is not shown")
		}
		free()
		time.Sleep(time.Second)
		synctest.Wait()
		if c.failingNow(t) || acked() != len(acks) {
			t.Errorf("after it: alarm %v, %d of %d records acknowledged", c.failingNow(t), acked(), len(acks))
		}
		stop()
		if got := shape(readDir(dir)); len(got) != 21 || got[0] != "before complete" || got[20] != "full-19 complete" {
			t.Errorf("lines %q, want 21 in order", got)
		}
	})
}

func TestAnAmendmentThatCannotBeWrittenIsNotAcknowledgedAndComesLater(t *testing.T) {
	dir, full, free := smallDisk(t)
	synctest.Test(t, func(t *testing.T) {
		c, stop := start(t, Options{Dir: dir})
		c.in <- message{rec: rec(phase.Disagg, "a")}
		c.in <- message{rec: rec(phase.Gen, "a")}
		time.Sleep(3 * time.Second)
		full() // not even the file of amendments can be made
		inodes := exhaust(t, dir)
		late, again := &fakeAck{dir: dir}, &fakeAck{dir: dir}
		c.in <- message{rec: rec(phase.Ctx, "a"), ack: late}
		time.Sleep(3 * time.Second)
		c.in <- message{rec: rec(phase.Ctx, "a"), ack: again} // the stream brings it once more
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if late.seen() != 0 || again.seen() != 0 {
			t.Errorf("acknowledged %d and %d times without a line", late.seen(), again.seen())
		}
		free()
		inodes()
		time.Sleep(time.Second)
		synctest.Wait()
		if late.seen() != 1 || again.seen() != 1 || late.onDisk != 2 {
			t.Errorf("after it: acknowledged %d and %d times with %d lines on disk", late.seen(), again.seen(), late.onDisk)
		}
		stop()
		if got, want := shape(readDir(dir)), []string{"a -ctx ctx0 sub 0 attempt 0", "a complete amends"}; !slices.Equal(got, want) {
			t.Errorf("lines %q, want %q", got, want)
		}
	})
}

// exhaust makes files until the file system has room for no more.
func exhaust(t *testing.T, dir string) (undo func()) {
	t.Helper()
	sub := filepath.Join(dir, "many")
	os.Mkdir(sub, 0o700)
	for i := 0; ; i++ {
		if i > 1<<20 {
			t.Fatal("the file system takes any number of files")
		}
		f, err := os.Create(filepath.Join(sub, fmt.Sprint(i)))
		if err != nil {
			break
		}
		f.Close()
	}
	return func() { os.RemoveAll(sub) }
}
