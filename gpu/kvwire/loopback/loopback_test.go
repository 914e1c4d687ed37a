package loopback

import "testing"

func TestACopyTakesTimeAndNothingIsNotCopied(t *testing.T) {
	for _, c := range [][2]int{{1, 1}, {1 << 20, 4096}, {100_001, 1 << 16}} {
		took, err := Copy(c[0], c[1])
		if err != nil || took < 0 {
			t.Errorf("%d bytes in pieces of %d: %v, %v", c[0], c[1], took, err)
		}
		if c[0] > c[1] && took == 0 {
			t.Errorf("%d bytes in pieces of %d took no time", c[0], c[1])
		}
	}
	for _, c := range [][2]int{{0, 1}, {1, 0}} {
		if _, err := Copy(c[0], c[1]); err == nil {
			t.Errorf("%d bytes in pieces of %d: no error", c[0], c[1])
		}
	}
}
