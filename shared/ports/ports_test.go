package ports

import (
	"net"
	"runtime"
	"slices"
	"strconv"
	"testing"
)

const host = "127.0.0.1"

func TestKeptPortsDifferAndCanBeListenedAt(t *testing.T) {
	var all []string
	for range 20 {
		kept, release, err := Keep(host, 10)
		if err != nil || len(kept) != 10 {
			t.Fatalf("%v, %v", kept, err)
		}
		t.Cleanup(release)
		all = append(all, kept...)
	}
	for _, p := range all {
		l, err := net.Listen("tcp", net.JoinHostPort(host, p))
		if err != nil {
			t.Error(err)
			continue
		}
		l.Close()
	}
	slices.Sort(all)
	if n := len(slices.Compact(all)); n != 200 && runtime.GOOS == "linux" {
		t.Errorf("%d of 200 ports differ", n)
	}
}

func TestPortsOfOthersAreLeftOut(t *testing.T) {
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	used := l.Addr().(*net.TCPAddr).Port
	if kept, _, err := keep(host, 1, used, used+1); err == nil {
		t.Errorf("kept %v, where somebody listens", kept)
	}
	kept, release, err := Keep(host, 5)
	if err != nil {
		t.Fatal(err)
	}
	again := func() (n int) {
		for _, p := range kept {
			at, err := strconv.Atoi(p)
			if err != nil || at < first || at >= end {
				t.Errorf("port %q", p)
			}
			if _, release, err := keep(host, 1, at, at+1); err == nil {
				defer release()
				n++
			}
		}
		return n
	}
	if n := again(); n > 0 && runtime.GOOS == "linux" {
		t.Errorf("%d ports were kept twice", n)
	}
	if release(); again() == 0 {
		t.Error("no released port comes back")
	}
}
