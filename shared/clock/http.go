package clock

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
)

// OffsetPath is where OffsetHandler is to be mounted.
const OffsetPath = "/steady_clock_offset"

// maxPushBytes bounds the body of a push.
const maxPushBytes = 4096

// Reading is the body of GET /steady_clock_offset. TensorRT-LLM knows the first two fields (seconds); the others are ours.
type Reading struct {
	ReceiveTS  json.Number `json:"receive_ts"`
	TransmitTS json.Number `json:"transmit_ts"`
	ReceiveNS  *int64      `json:"receive_ns,omitempty"`
	TransmitNS *int64      `json:"transmit_ns,omitempty"`
	ClockID    ID          `json:"clock_id,omitempty"`
	MonoNS     *int64      `json:"mono_ns,omitempty"` // pair of the steady and the unslewed clock
	RawNS      *int64      `json:"raw_ns,omitempty"`
	PairErrNS  *int64      `json:"pair_err_ns,omitempty"`
	Pushed     *PushState  `json:"pushed,omitempty"`
}

// OffsetHandler answers GET and POST /steady_clock_offset.
func OffsetHandler(s *Steady, a *Adjusted) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		received := s.Reported() // the first line: t2 must not be early, and each line before this one makes it later
		switch r.Method {
		case http.MethodGet:
			writeReading(w, s, a, received)
		case http.MethodPost:
			takePush(w, r, a)
		default:
			w.Header().Set("Allow", "GET, POST")
			refuse(w, http.StatusMethodNotAllowed, fmt.Errorf("method %s: want GET or POST", r.Method))
		}
	})
}

// writeReading prepares everything first and stamps the sending time last: t3 must not be late, and should hardly be early.
func writeReading(w http.ResponseWriter, s *Steady, a *Adjusted, received int64) {
	mono, raw, half := s.Raw()
	pushed, err := json.Marshal(a.State())
	if err != nil {
		refuse(w, http.StatusInternalServerError, fmt.Errorf("encode the pushed offset: %w", err))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	b := make([]byte, 0, 512)
	b = append(b, `{"clock_id":"`...)
	b = append(b, s.ID()...)
	b = append(b, `","mono_ns":`...)
	b = strconv.AppendInt(b, mono, 10)
	b = append(b, `,"raw_ns":`...)
	b = strconv.AppendInt(b, raw, 10)
	b = append(b, `,"pair_err_ns":`...)
	b = strconv.AppendInt(b, half, 10)
	b = append(b, `,"pushed":`...)
	b = append(b, pushed...)
	b = append(b, `,"receive_ns":`...)
	b = strconv.AppendInt(b, received, 10)
	b = append(b, `,"receive_ts":`...)
	b = AppendSeconds(b, received)
	sent := s.Reported()
	b = append(b, `,"transmit_ns":`...)
	b = strconv.AppendInt(b, sent, 10)
	b = append(b, `,"transmit_ts":`...)
	b = AppendSeconds(b, sent)
	b = append(b, '}')
	_, _ = w.Write(b) // a client that went away learns nothing, and there is nobody else to tell
}

func takePush(w http.ResponseWriter, r *http.Request, a *Adjusted) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxPushBytes))
	if err != nil {
		refuse(w, http.StatusRequestEntityTooLarge, fmt.Errorf("read body: %w (at most %d bytes)", err, maxPushBytes))
		return
	}
	p, err := ParsePush(body)
	if err == nil {
		err = a.Push(p)
	}
	switch {
	case err == nil:
		w.WriteHeader(http.StatusOK)
	case errors.Is(err, ErrStale), errors.Is(err, ErrForeignEpoch):
		refuse(w, http.StatusConflict, err)
	default:
		refuse(w, http.StatusBadRequest, err)
	}
}

// ParsePush reads the body of a push. NaN and infinities are no JSON, whatever Python writes; they are refused here.
func ParsePush(body []byte) (Push, error) {
	var p Push
	if err := json.Unmarshal(body, &p); err != nil {
		return Push{}, fmt.Errorf(`%w: want {"offset": seconds}: %w`, ErrInvalid, err)
	}
	if _, err := p.nanoseconds(); err != nil {
		return Push{}, err
	}
	return p, nil
}

func refuse(w http.ResponseWriter, status int, err error) {
	body, _ := json.Marshal(map[string]any{"error": map[string]any{"message": err.Error(), "type": "invalid_request_error", "code": status}})
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

// AppendSeconds writes ns as seconds with nine decimals, exactly.
func AppendSeconds(b []byte, ns int64) []byte {
	if ns < 0 {
		b = append(b, '-')
		ns = -ns
	}
	b = strconv.AppendInt(b, ns/1e9, 10)
	b = append(b, '.')
	f := strconv.FormatInt(1e9+ns%1e9, 10)
	return append(b, f[1:]...)
}
