//go:build !(cuda && cgo)

package nvml

import "fmt"

func openCard(card) (func() reading, error) {
	return nil, fmt.Errorf("%w: this program was built without it: it needs the tag cuda and a C compiler", ErrUnavailable)
}
