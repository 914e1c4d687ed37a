package clock

import (
	"errors"
	"fmt"
)

const (
	epochLen    = 16
	instanceLen = 8
	idLen       = epochLen + 1 + instanceLen
)

// ErrBadID is returned when a text is no clock id.
var ErrBadID = errors.New("clock: bad clock id")

// ID names a steady clock: 16 hex digits of the epoch, ".", 8 of the instance. The epoch is the clock (boot, time
// namespace, suspends); the instance is the process that reads it. Two processes of one kernel and one time namespace
// share the epoch. An estimate belongs to a pair of epochs and dies with them.
type ID string

// ParseID checks that s is a clock id.
func ParseID(s string) (ID, error) {
	if len(s) != idLen || s[epochLen] != '.' || !isHex(s[:epochLen]) || !isHex(s[epochLen+1:]) {
		return "", fmt.Errorf("%w %q: want 16 lower-case hex digits, a dot, 8 hex digits", ErrBadID, s)
	}
	return ID(s), nil
}

// MakeID builds the id of an epoch and an instance.
func MakeID(epoch uint64, instance uint32) ID {
	return ID(fmt.Sprintf("%016x.%08x", epoch, instance))
}

// Epoch returns the part that names the clock itself; "" when the id is malformed.
func (id ID) Epoch() string {
	if len(id) != idLen {
		return ""
	}
	return string(id[:epochLen])
}

// Instance returns the part that names the process; "" when the id is malformed.
func (id ID) Instance() string {
	if len(id) != idLen {
		return ""
	}
	return string(id[epochLen+1:])
}

// Words returns both parts as numbers, for binary packets.
func (id ID) Words() (epoch uint64, instance uint32, err error) {
	if _, err := ParseID(string(id)); err != nil {
		return 0, 0, err
	}
	for _, c := range []byte(id.Epoch()) {
		epoch = epoch<<4 | uint64(hexValue(c))
	}
	for _, c := range []byte(id.Instance()) {
		instance = instance<<4 | uint32(hexValue(c))
	}
	return epoch, instance, nil
}

func isHex(s string) bool {
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

func hexValue(c byte) byte {
	if c >= 'a' {
		return c - 'a' + 10
	}
	return c - '0'
}
