// Package bytesize reads sizes as people write them on a command line.
package bytesize

import (
	"fmt"
	"strconv"
	"strings"
)

// Size is a number of bytes, written as 1048576, 1024KiB, 1MiB or 1GiB.
type Size int64

// UnmarshalText reads a size.
func (s *Size) UnmarshalText(b []byte) error {
	text := strings.TrimSpace(string(b))
	shift := 0
	for _, u := range []struct {
		suffix string
		shift  int
	}{{"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}} {
		if rest, ok := strings.CutSuffix(text, u.suffix); ok {
			text, shift = strings.TrimSpace(rest), u.shift
			break
		}
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || n > 1<<62>>shift {
		return fmt.Errorf("size %q: want a number of bytes, or one with KiB, MiB, GiB or TiB", b)
	}
	*s = Size(n << shift)
	return nil
}
