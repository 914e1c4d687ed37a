package nvml

import (
	"errors"
	"os"
	"testing"

	"meridian.internal/shared/rows"
)

func TestTheCardIsTheOneThatCUDASees(t *testing.T) {
	for _, tt := range []struct {
		gpu     int
		visible string
		want    card
		ok      bool
	}{
		{1, "", card{index: 1}, true},
		{0, "3,1", card{index: 3}, true},
		{1, "3, 1", card{index: 1}, true},
		{1, "0,GPU-8932f937-d72c", card{uuid: "GPU-8932f937-d72c"}, true},
		{2, "3,1", card{}, false},
		{0, "-1", card{}, false},
		{0, "NoDevFiles", card{}, false},
	} {
		got, err := cardOf(tt.gpu, tt.visible)
		if got != tt.want || (err == nil) != tt.ok || err != nil && !errors.Is(err, ErrUnavailable) {
			t.Errorf("card %d of %q: %+v, %v", tt.gpu, tt.visible, got, err)
		}
	}
}

// TestUnitsAreThoseOfTheLedger gives every value another number, and leaves one out.
func TestUnitsAreThoseOfTheLedger(t *testing.T) {
	r := reading{
		name: "H200", gpuPercent: rows.Some(50), memoryPercent: rows.Some(25), memoryUsedBytes: rows.Some(7), memoryTotalBytes: rows.Some(9),
		powerMilliwatts: rows.Some(412_500), energyMillijoules: rows.Some(1_500), temperatureCelsius: rows.Some(61),
		smClockMHz: rows.Some(1980), clockReasons: rows.Some(4), eccCorrected: rows.Some(0), eccUncorrected: rows.Some(3),
	}
	ratio := func(v float64) rows.Ratio { return rows.Ratio{V: v, OK: true} }
	want := rows.GPU{
		Index: 2, Name: "H200", Utilization: ratio(.5), MemoryUtilization: ratio(.25), MemoryUsed: rows.Some(7), MemoryTotal: rows.Some(9),
		Power: ratio(412.5), Energy: ratio(1.5), Temperature: ratio(61), SMClock: ratio(1.98e9), ThrottleReasons: rows.Some(4),
		ECCCorrected: rows.Some(0), ECCUncorrected: rows.Some(3),
	}
	if got := r.gpu(2); got != want {
		t.Errorf("%+v\nwant %+v", got, want)
	}
}

// TestNVMLReadsTheCard reads a real card, where there is one.
func TestNVMLReadsTheCard(t *testing.T) {
	read, err := Open([]int{0}, os.Getenv("CUDA_VISIBLE_DEVICES"))
	if errors.Is(err, ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	first, err := read()
	if err != nil || len(first) != 1 {
		t.Fatalf("%+v, %v", first, err)
	}
	g := first[0]
	t.Logf("%+v", g)
	if g.Name == "" || g.MemoryTotal.V < 1<<30 || g.MemoryUsed.V > g.MemoryTotal.V || !g.Temperature.OK || g.Temperature.V < 5 || g.Temperature.V > 120 {
		t.Errorf("no card looks like this: %+v", g)
	}
	if g.Energy.OK {
		for range 1000 { // the driver's counter moves some times a second
			if again, err := read(); err != nil || again[0].Energy.V > g.Energy.V {
				return
			}
		}
		t.Errorf("the energy counter stays at %v J over 1,000 readings", g.Energy.V)
	}
}
