package proxy

import (
	"encoding/base64"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"meridian.internal/router/keys"
	"meridian.internal/shared/api"
)

const stageAuth = "auth"

// authenticate finds out who sends the request and counts it against the limits of its key. With no keys configured
// everybody may, and nobody is named.
func (s *session) authenticate(r *http.Request) *api.Error {
	store := s.p.o.Keys
	if store == nil {
		return nil
	}
	who, _, e := identify(store, r, false)
	if e != nil {
		return e
	}
	s.principal = who.ID()
	err := who.Begin(time.Now())
	var full *keys.Refused
	if errors.As(err, &full) {
		return &api.Error{
			Code: http.StatusTooManyRequests, Type: api.TypeRateLimit, Stage: stageAuth, Retryable: true, RetryAfter: full.After, Message: full.Error(),
		}
	}
	s.who = who
	return nil
}

// endKey counts what the request cost: nothing where no nodes were found for it.
func (s *session) endKey() {
	if s.who == nil {
		return
	}
	tokens := 0
	if slices.ContainsFunc(s.subs, (*sub).placed) {
		tokens = s.usage().TotalTokens
	}
	s.who.End(time.Now(), tokens)
}

// placed tells whether nodes were found for any attempt.
func (b *sub) placed() bool {
	return slices.ContainsFunc(b.tries, func(a *attempt) bool { return a.choice != nil })
}

// knowsModel tells whether a model is served to this client. One that its key may not use is unknown to it.
func (s *session) knowsModel(name string) bool {
	return s.p.o.Pool.KnowsModel(name) && (s.who == nil || s.who.MayUse(name))
}

// identify reads the key of a request. Two Authorization headers are refused: another reader could take the other one.
func identify(store *keys.Store, r *http.Request, basic bool) (who *keys.Principal, admin bool, e *api.Error) {
	values := r.Header["Authorization"]
	if len(values) != 1 {
		return nil, false, unauthorized("send one header Authorization: Bearer KEY")
	}
	scheme, secret, _ := strings.Cut(values[0], " ")
	switch {
	case strings.EqualFold(scheme, "Bearer"):
		secret = strings.TrimSpace(secret)
	case basic && strings.EqualFold(scheme, "Basic"):
		b, _ := base64.StdEncoding.DecodeString(strings.TrimSpace(secret)) // what is malformed is no key
		_, secret, _ = strings.Cut(string(b), ":")
	default:
		return nil, false, unauthorized("send the header Authorization: Bearer KEY")
	}
	if who, admin = store.Find(secret); who == nil {
		return nil, false, unauthorized("this API key is not known")
	}
	return who, admin, nil
}

func unauthorized(message string) *api.Error {
	return &api.Error{Code: http.StatusUnauthorized, Type: api.TypeAuthentication, Stage: stageAuth, Message: message}
}

// Allow is who may use a route: /v1 asks for the key itself, health is open to all (shared/serve leaves it out), and all
// else needs the key of an administrator. A browser may send that by Basic authentication, as the password, where nothing
// is changed: it attaches it also to what other sites make it send.
func (p *Proxy) Allow(r *http.Request) *api.Error {
	if p.o.Keys == nil || strings.HasPrefix(r.URL.Path, "/v1/") {
		return nil
	}
	reads := r.Method == http.MethodGet || r.Method == http.MethodHead
	_, admin, e := identify(p.o.Keys, r, reads)
	switch {
	case e != nil:
		if reads {
			e.Challenge = `Basic realm="meridian"` // a browser asks its user for it
		}
		return e
	case !admin:
		return &api.Error{Code: http.StatusForbidden, Type: api.TypePermission, Stage: stageAuth, Message: "this needs the key of an administrator"}
	}
	return nil
}
