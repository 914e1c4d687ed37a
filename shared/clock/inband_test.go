package clock

import (
	"errors"
	"testing"
)

func TestInbandStampsSurviveARoundTrip(t *testing.T) {
	want := MakeID(0xabc, 0xdef)
	id, received, sent, err := ParseInband(string(AppendInband(nil, want, 12, 3_000_000_000_000_004)))
	if err != nil || id != want || received != 12 || sent != 3_000_000_000_000_004 {
		t.Errorf("got %s %d %d, %v", id, received, sent, err)
	}
}

func TestBadInbandStampsAreRefused(t *testing.T) {
	id := string(MakeID(1, 2))
	for name, s := range map[string]string{
		"empty": "", "id alone": id, "one number": id + " 5", "no id": "5 6", "falling": id + " 6 5", "negative": id + " -1 5",
		"NaN": id + " NaN 5", "too large for sums": id + " 5 9223372036854775807", "three numbers": id + " 5 6 7", "seconds": id + " 5.0 6.0",
	} {
		if _, _, _, err := ParseInband(s); !errors.Is(err, ErrBadInband) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestClockSyncIsTensorRTLLMs(t *testing.T) {
	if got := string(AppendClockSync(nil, 1_100_050_000_000, 1_100_350_000_001)); got != "receive;ts=1100.050000000, transmit;ts=1100.350000001" {
		t.Errorf("%s", got)
	}
}

func FuzzParseInband(f *testing.F) {
	f.Add(string(AppendInband(nil, MakeID(1, 2), 3, 4)))
	f.Add(" 1 2")
	f.Fuzz(func(t *testing.T, s string) {
		id, received, sent, err := ParseInband(s)
		if err != nil {
			if !errors.Is(err, ErrBadInband) {
				t.Fatalf("undocumented error %v", err)
			}
			return
		}
		i2, r2, s2, err := ParseInband(string(AppendInband(nil, id, received, sent)))
		if err != nil || i2 != id || r2 != received || s2 != sent {
			t.Fatalf("%q: %s %d %d became %s %d %d, %v", s, id, received, sent, i2, r2, s2, err)
		}
	})
}
