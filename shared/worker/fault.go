package worker

import (
	"net/http"
	"time"

	"meridian.internal/shared/api"
)

// explainKind gives the answer for an error of the engine, by its kind (gpu/device names them); nil for an unknown one.
func explainKind(kind, stage, text string) *api.Error {
	for _, k := range []struct {
		kind      string
		status    int
		errorType string
		stage     string // "": the node's
		retryable bool
	}{
		{"busy", http.StatusServiceUnavailable, api.TypeOverloaded, "", true},
		{"draining", http.StatusServiceUnavailable, api.TypeUnavailable, "", true},
		{"stopped", http.StatusServiceUnavailable, api.TypeUnavailable, "engine", true},
		{"too_long", http.StatusBadRequest, api.TypeInvalid, "parse", false},
		{"invalid", http.StatusBadRequest, api.TypeInvalid, "parse", false},
		{"deadline", http.StatusGatewayTimeout, api.TypeTimeout, "", false},
		{"cancelled", statusClientGone, api.TypeCancelled, "", false},
		{"no_token", http.StatusInternalServerError, api.TypeServer, "engine", false},
	} {
		if k.kind != kind {
			continue
		}
		e := &api.Error{Code: k.status, Type: k.errorType, Stage: k.stage, Retryable: k.retryable, Message: text}
		if e.Stage == "" {
			e.Stage = stage
		}
		if k.status == http.StatusServiceUnavailable {
			e.RetryAfter = time.Second
		}
		return e
	}
	return nil
}
