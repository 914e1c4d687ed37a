package load

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
)

const maxLength = 1 << 20

// Dist is a distribution of lengths in tokens: "64", "uniform:16:256" or "lognormal:128:0.6" (median and sigma).
type Dist struct {
	kind string
	a, b float64
}

// ParseDist reads a distribution.
func ParseDist(s string) (Dist, error) {
	parts := strings.Split(s, ":")
	kind := parts[0]
	if len(parts) == 1 {
		kind, parts = "const", []string{"const", s}
	}
	want := map[string]int{"const": 2, "uniform": 3, "lognormal": 3}[kind]
	bad := fmt.Errorf("length distribution %q: want N, uniform:MIN:MAX or lognormal:MEDIAN:SIGMA", s)
	if want == 0 || len(parts) != want {
		return Dist{}, bad
	}
	d := Dist{kind: kind}
	for i, p := range parts[1:] {
		v, err := strconv.ParseFloat(p, 64)
		if err != nil || !(v >= 0 && v <= maxLength) {
			return Dist{}, bad
		}
		if i == 0 {
			d.a = v
		} else {
			d.b = v
		}
	}
	if d.a < 1 || kind == "uniform" && d.b < d.a || kind == "lognormal" && d.b > 10 {
		return Dist{}, bad
	}
	return d, nil
}

// UnmarshalText makes Dist an option.
func (d *Dist) UnmarshalText(b []byte) (err error) {
	*d, err = ParseDist(string(b))
	return err
}

// Draw gives one length, at least 1.
func (d Dist) Draw(r *rand.Rand) int {
	v := d.a
	switch d.kind {
	case "uniform":
		v = d.a + float64(r.IntN(int(d.b-d.a)+1))
	case "lognormal":
		v = d.a * math.Exp(d.b*r.NormFloat64())
	}
	return int(min(max(math.Round(v), 1), maxLength))
}

// Constant is the distribution of one length.
func Constant(n int) Dist { return Dist{kind: "const", a: float64(n)} }
