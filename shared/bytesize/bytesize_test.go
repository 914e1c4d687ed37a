package bytesize

import (
	"strings"
	"testing"
)

func TestSizesAreRead(t *testing.T) {
	for text, want := range map[string]Size{"0": 0, "17": 17, "2KiB": 2048, " 3 MiB ": 3 << 20, "1GiB": 1 << 30, "1TiB": 1 << 40} {
		var s Size
		if err := s.UnmarshalText([]byte(text)); err != nil || s != want {
			t.Errorf("%q is %d, %v; want %d", text, s, err, want)
		}
	}
	for _, bad := range []string{"", "-1", "1.5GiB", "1MB", "8388608TiB"} {
		var s Size
		if err := s.UnmarshalText([]byte(bad)); err == nil || !strings.Contains(err.Error(), "KiB, MiB, GiB or TiB") {
			t.Errorf("%q is %d, %v", bad, s, err)
		}
	}
}

func FuzzSize(f *testing.F) {
	f.Add("12MiB")
	f.Add("-1")
	f.Add("9999999999TiB")
	f.Fuzz(func(t *testing.T, text string) {
		var s Size
		if err := s.UnmarshalText([]byte(text)); err == nil && s < 0 {
			t.Fatalf("%q became %d", text, s)
		}
	})
}
