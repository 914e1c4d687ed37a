package bus

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func mustOpen(t *testing.T, dir string, maxBytes, segment int64) (*spool, position, int64) {
	t.Helper()
	s, start, found, err := openSpool(dir, maxBytes, segment)
	if err != nil {
		t.Fatal(err)
	}
	return s, start, found
}

func ids(t *testing.T, r *spoolReader) []string {
	t.Helper()
	var out []string
	for {
		es, err := r.next()
		if err != nil {
			t.Fatal(err)
		}
		if len(es) == 0 {
			return out
		}
		for _, e := range es {
			out = append(out, e.id)
		}
	}
}

func record(i int) entry {
	return entry{subject: "meridian.phase.r.ctx.n", id: fmt.Sprint(i), kind: byte(i % 2), data: bytes.Repeat([]byte{byte(i)}, 10*i)}
}

func TestSpoolReturnsEveryEntryInOrderAcrossSegments(t *testing.T) {
	s, start, _ := mustOpen(t, t.TempDir(), 1<<20, 200)
	r := newSpoolReader(s, start)
	defer r.close()
	const sizes, entries = 20, 4 * maxKept // in more segments than are kept
	for i := range entries {
		if _, _, err := s.append(record(i % sizes)); err != nil {
			t.Fatal(err)
		}
	}
	if segs, _ := s.list(); len(segs) <= 1+maxKept {
		t.Fatalf("%d segments, too few to tell", len(segs))
	}
	next := 0
	for next < entries {
		es, err := r.next()
		if err != nil || len(es) == 0 {
			t.Fatalf("next after %d: %d entries, %v", next, len(es), err)
		}
		for _, e := range es {
			if w := record(next % sizes); e.id != w.id || e.subject != w.subject || e.kind != w.kind || !bytes.Equal(e.data, w.data) {
				t.Fatalf("entry %d came back as %+v", next, e)
			}
			next++
		}
	}
	if err := s.commit(r.at); err != nil {
		t.Fatal(err)
	}
	if segs, _ := s.list(); len(segs) > 1+maxKept {
		t.Errorf("acknowledged segments stay on disk: %v", segs)
	}
	s.close(r.at)
	if segs, _ := s.list(); len(segs) != 0 {
		t.Errorf("segments stay on disk: %v", segs)
	}
}

func TestSpoolRestart(t *testing.T) {
	cases := []struct {
		name      string
		committed int // entries read and committed before the process dies
		tear      int // bytes cut off the last segment
		want      []string
	}{
		{"nothing was acknowledged: all come back", 0, 0, []string{"0", "1", "2", "3"}},
		{"all was acknowledged: nothing comes back", 4, 0, nil},
		{"a torn last entry is dropped, the others come back", 0, 3, []string{"0", "1", "2"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			dir := t.TempDir()
			s, start, _ := mustOpen(t, dir, 1<<20, 1<<20)
			for i := range 4 {
				s.append(record(i))
			}
			if c.committed > 0 {
				r := newSpoolReader(s, start)
				ids(t, r)
				s.commit(r.at)
			}
			path, size := s.path(s.seg), s.sizes[s.seg]
			s.w.close() // the process dies: nothing is tidied up
			s.release()
			if c.tear > 0 {
				os.Truncate(path, size-int64(c.tear))
			}
			s2, start, found := mustOpen(t, dir, 1<<20, 1<<20)
			if found != int64(len(c.want)) {
				t.Errorf("found %d, want %d", found, len(c.want))
			}
			s2.append(record(9))
			got := ids(t, newSpoolReader(s2, start))
			if fmt.Sprint(got) != fmt.Sprint(append(c.want, "9")) {
				t.Errorf("came back: %v, want %v and the new one", got, c.want)
			}
			s2.close(position{})
		})
	}
}

func TestSpoolRefusesWhatWouldExceedItsLimit(t *testing.T) {
	s, _, _ := mustOpen(t, t.TempDir(), 300, 100)
	defer s.close(position{})
	var err error
	for i := 0; err == nil && i < 100; i++ {
		_, _, err = s.append(record(3))
	}
	if !errors.Is(err, ErrSpoolFull) || s.bytes() > 300 {
		t.Errorf("error %v at %d bytes, want ErrSpoolFull at 300 or less", err, s.bytes())
	}
}

func TestSpoolFolderBelongsToOneProcess(t *testing.T) {
	dir := t.TempDir()
	s, _, _ := mustOpen(t, dir, 1<<20, 1<<20)
	if _, _, _, err := openSpool(dir, 1<<20, 1<<20); !errors.Is(err, ErrSpoolLocked) {
		t.Errorf("second opening: %v, want ErrSpoolLocked", err)
	}
	s.close(position{})
	s, _, _ = mustOpen(t, dir, 1<<20, 1<<20)
	s.close(position{})
}

func TestSpoolSkipsDamageInTheMiddle(t *testing.T) {
	dir := t.TempDir()
	s, start, _ := mustOpen(t, dir, 1<<20, 120)
	for i := range 6 {
		s.append(record(i))
	}
	b, _ := os.ReadFile(filepath.Join(dir, "0000000001.spool"))
	b[frameHeader+1] ^= 1
	os.WriteFile(filepath.Join(dir, "0000000001.spool"), b, 0o600)
	r := newSpoolReader(s, start)
	if _, err := r.next(); !errors.Is(err, errTorn) {
		t.Fatalf("error %v, want errTorn", err)
	}
	if got := ids(t, r); len(got) == 0 || got[len(got)-1] != "5" {
		t.Errorf("after the damage: %v, want what the later segments hold", got)
	}
	s.close(position{})
}

func TestATornWriteHidesNothing(t *testing.T) {
	for _, broken := range []bool{false, true} { // the file takes no repair either
		dir := t.TempDir()
		s, start, _ := mustOpen(t, dir, 1<<20, 1<<10)
		r := newSpoolReader(s, start)
		_, to, err := s.append(record(1))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.w.write(appendFrame(nil, record(2))[:20], to.off); err != nil {
			t.Fatal(err)
		}
		if broken {
			s.w.close()
		}
		if err := s.untear(to.off); err != nil {
			t.Fatal(err)
		}
		if _, _, err := s.append(record(3)); err != nil {
			t.Fatal(err)
		}
		if got := ids(t, r); !slices.Equal(got, []string{"1", "3"}) {
			t.Errorf("broken %v: %v came back", broken, got)
		}
		r.close()
		s.close(position{})
		s, start, found := mustOpen(t, dir, 1<<20, 1<<10)
		r = newSpoolReader(s, start)
		if got := ids(t, r); found != 2 || !slices.Equal(got, []string{"1", "3"}) {
			t.Errorf("broken %v, after a restart: %d, %v came back", broken, found, got)
		}
		r.close()
		s.close(position{})
	}
}

func FuzzParseFrame(f *testing.F) {
	f.Add(appendFrame(nil, record(3)))
	f.Add([]byte{})
	f.Add(bytes.Repeat([]byte{0xff}, 40))
	f.Fuzz(func(t *testing.T, b []byte) {
		e, size, ok := parseFrame(b)
		if ok && !bytes.Equal(appendFrame(nil, e), b[:size]) {
			t.Errorf("frame does not survive a round trip: %+v", e)
		}
	})
}
