package api

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"meridian.internal/shared/jsonline"
)

// Types of errors, as in OpenAI's error object.
const (
	TypeInvalid     = "invalid_request_error"
	TypeNotFound    = "not_found_error"
	TypeOverloaded  = "overloaded_error"
	TypeUnavailable = "service_unavailable_error"
	TypeServer      = "server_error"
	TypeTimeout     = "timeout_error"
	TypeCancelled   = "cancelled_error"

	TypeAuthentication = "authentication_error"
	TypePermission     = "permission_error"
	TypeRateLimit      = "rate_limit_error"
)

const maxErrorText = 2048 // text of an error that came from a worker is cut here

// Error is what a client or the router is told. It marshals to OpenAI's error object with the stage that failed, whether
// a retry may help, and the request id inside.
type Error struct {
	Code       int // HTTP status
	Message    string
	Type       string
	Param      string // field at fault; "" if none
	Stage      string // auth, parse, place, ctx, kv, gen, relay, engine
	Retryable  bool
	RequestID  string
	RetryAfter time.Duration // 0: no Retry-After header
	Challenge  string        // WWW-Authenticate of a 401; "": Bearer
}

// Invalid is a 400 that names a field.
func Invalid(param, format string, args ...any) *Error {
	return &Error{
		Code: http.StatusBadRequest, Type: TypeInvalid, Param: param, Stage: "parse",
		Message: fmt.Sprintf(format, args...),
	}
}

// BodyLate is the error of a request whose body did not come in time.
func BodyLate(limit time.Duration) *Error {
	e := Invalid("", "the body did not come within %s", limit)
	e.Code = http.StatusRequestTimeout
	return e
}

// Unavailable is a 503: not now. after tells when a retry may help.
func Unavailable(stage string, after time.Duration, format string, args ...any) *Error {
	return &Error{
		Code: http.StatusServiceUnavailable, Type: TypeUnavailable, Stage: stage, Retryable: true, RetryAfter: after,
		Message: fmt.Sprintf(format, args...),
	}
}

// Failed is a 502: a stage behind the router failed.
func Failed(stage string, retryable bool, format string, args ...any) *Error {
	return &Error{
		Code: http.StatusBadGateway, Type: TypeServer, Stage: stage, Retryable: retryable,
		Message: fmt.Sprintf(format, args...),
	}
}

// Error is the message with its stage.
func (e *Error) Error() string { return e.Stage + ": " + e.Message }

// Status is the HTTP status.
func (e *Error) Status() int {
	if e.Code == 0 {
		return http.StatusInternalServerError
	}
	return e.Code
}

// SetHeader sets the headers that go with the error.
func (e *Error) SetHeader(h http.Header) {
	h.Set("Content-Type", "application/json")
	if e.Code == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", cmp.Or(e.Challenge, "Bearer"))
	}
	if e.RetryAfter > 0 {
		seconds := int64((e.RetryAfter + time.Second - 1) / time.Second)
		h.Set("Retry-After", strconv.FormatInt(seconds, 10))
	}
}

// Append appends {"error":{...}}.
func (e *Error) Append(dst []byte) []byte {
	dst = append(dst, `{"error":{"message":`...)
	dst = jsonline.AppendString(dst, e.Message)
	dst = append(dst, `,"type":`...)
	dst = jsonline.AppendString(dst, e.Type)
	dst = append(dst, `,"param":`...)
	if e.Param == "" {
		dst = append(dst, "null"...)
	} else {
		dst = jsonline.AppendString(dst, e.Param)
	}
	dst = append(dst, `,"code":`...)
	dst = strconv.AppendInt(dst, int64(e.Status()), 10)
	dst = append(dst, `,"stage":`...)
	dst = jsonline.AppendString(dst, e.Stage)
	dst = append(dst, `,"retryable":`...)
	dst = strconv.AppendBool(dst, e.Retryable)
	if e.RequestID != "" {
		dst = append(dst, `,"request_id":`...)
		dst = jsonline.AppendString(dst, e.RequestID)
	}
	return append(dst, '}', '}')
}

// MarshalJSON gives the same bytes as Append.
func (e *Error) MarshalJSON() ([]byte, error) { return e.Append(nil), nil }

// workerError has the fields of our nodes', OpenAI's and TensorRT-LLM's error objects.
type workerError struct {
	Message   string          `json:"message"`
	Type      string          `json:"type"`
	Param     *string         `json:"param"`
	Stage     string          `json:"stage"`
	Retryable *bool           `json:"retryable"`
	Detail    json.RawMessage `json:"detail"` // FastAPI
	Code      json.RawMessage `json:"code"`   // the status, where it is a number
}

// ParseError understands an error answer of a worker: {"error":{...}} (ours, OpenAI's), {"object":"error","message":...}
// (TensorRT-LLM), {"detail":...} (FastAPI), or plain text. stage is used when the worker names none. A status that is not for
// clients becomes a 502: another worker may do better.
func ParseError(status int, body []byte, stage string) *Error {
	return readError(body).toError(status, stage)
}

// ParseEvent is ParseError for an error within a stream, whose status is its code; what names none failed in the worker.
func ParseEvent(data []byte, stage string) *Error {
	in := readError(data)
	status, err := decodeInt(in.Code, 400, 599)
	if err != nil {
		status = http.StatusBadGateway
	}
	return in.toError(int(status), stage)
}

func readError(body []byte) workerError {
	var outer struct {
		workerError
		Error json.RawMessage `json:"error"`
	}
	in := workerError{}
	if json.Unmarshal(body, &outer) == nil {
		in = outer.workerError
		if len(outer.Error) > 0 && outer.Error[0] == '{' {
			in = workerError{}
			_ = json.Unmarshal(outer.Error, &in) // a field of a wrong type leaves the rest
		} else if len(outer.Error) > 0 {
			in.Message, _ = decodeString(outer.Error)
		}
	}
	if in.Message == "" && len(in.Detail) > 0 {
		if in.Message, _ = decodeString(in.Detail); in.Message == "" {
			in.Message = string(in.Detail)
		}
	}
	if in.Message == "" {
		in.Message = string(body)
	}
	return in
}

func (in workerError) toError(status int, stage string) *Error {
	e := &Error{Code: status, Message: in.Message, Type: in.Type, Stage: in.Stage}
	if len(e.Message) > maxErrorText {
		e.Message = e.Message[:maxErrorText]
	}
	if e.Message == "" {
		e.Message = http.StatusText(status)
	}
	if in.Param != nil {
		e.Param = *in.Param
	}
	if e.Stage == "" {
		e.Stage = stage
	}
	if status == statusClientGone || in.Type == TypeCancelled { // who reads this has not left: the worker was stopped before the request had ended
		e.Message = "it stopped: " + e.Message
		status, e.Code, e.Type, in.Retryable = http.StatusServiceUnavailable, http.StatusServiceUnavailable, "", nil
	}
	if !clients(status) { // between router and worker: a client could take it for an answer, or for a word on its own key
		e.Message = fmt.Sprintf("it answered with status %d: %s", status, e.Message)
		status, e.Code, e.Type = http.StatusBadGateway, http.StatusBadGateway, ""
	}
	if e.Type == "" || e.Type == "BadRequestError" {
		e.Type = typeOf(status)
	}
	e.Retryable = status == http.StatusTooManyRequests || status >= 500
	if in.Retryable != nil { // a worker knows better when it is of no use, but not of a bad request
		e.Retryable = e.Retryable && *in.Retryable
	}
	return e
}

// clients tells whether a worker's status says something of the request, or of the worker's own state, so that a client may have it.
func clients(status int) bool {
	switch status {
	case http.StatusBadRequest, http.StatusNotFound, http.StatusConflict, http.StatusRequestEntityTooLarge, http.StatusUnsupportedMediaType,
		http.StatusUnprocessableEntity, http.StatusTooManyRequests:
		return true
	}
	return status >= 500 && status < 600
}

// statusClientGone is nginx's, for a client that left.
const statusClientGone = 499

func typeOf(status int) string {
	switch {
	case status == http.StatusNotFound:
		return TypeNotFound
	case status == http.StatusTooManyRequests:
		return TypeOverloaded
	case status == http.StatusServiceUnavailable:
		return TypeUnavailable
	case status == http.StatusGatewayTimeout:
		return TypeTimeout
	case status >= 400 && status < 500:
		return TypeInvalid
	default:
		return TypeServer
	}
}
