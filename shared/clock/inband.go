package clock

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
)

// InbandHeader is on every answer of a node to a router: the stamps of its steady clock that make the request an exchange,
// "<clock id> <received ns> <sent ns>". TensorRT-LLM's X-TRTLLM-Clock-Sync cannot serve for that: it is in seconds of a
// clock that pushes adjust, and does not say of which process.
const InbandHeader = "X-Meridian-Clock"

// ErrBadInband is returned when a header is no InbandHeader.
var ErrBadInband = errors.New("clock: bad in-band stamps")

// AppendInband writes the value of InbandHeader.
func AppendInband(b []byte, id ID, receivedNS, sentNS int64) []byte {
	b = append(b, id...)
	b = strconv.AppendInt(append(b, ' '), receivedNS, 10)
	return strconv.AppendInt(append(b, ' '), sentNS, 10)
}

// ParseInband reads the value of InbandHeader.
func ParseInband(s string) (id ID, receivedNS, sentNS int64, err error) {
	text, rest, _ := strings.Cut(s, " ")
	received, sent, _ := strings.Cut(rest, " ")
	if id, err = ParseID(text); err != nil {
		return "", 0, 0, fmt.Errorf("%w: %w", ErrBadInband, err)
	}
	receivedNS, err1 := strconv.ParseInt(received, 10, 64)
	sentNS, err2 := strconv.ParseInt(sent, 10, 64)
	// A sum of two stamps is formed later: it must not overflow.
	if err1 != nil || err2 != nil || receivedNS < 0 || sentNS < receivedNS || sentNS > math.MaxInt64/2 {
		return "", 0, 0, fmt.Errorf("%w %.80q: want a clock id and two rising numbers of ns", ErrBadInband, s)
	}
	return id, receivedNS, sentNS, nil
}

// AppendClockSync writes the value of TensorRT-LLM's X-TRTLLM-Clock-Sync: seconds of the adjusted clock.
func AppendClockSync(b []byte, receivedNS, sentNS int64) []byte {
	b = AppendSeconds(append(b, "receive;ts="...), receivedNS)
	return AppendSeconds(append(b, ", transmit;ts="...), sentNS)
}
