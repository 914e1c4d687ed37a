package serve

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"

	"meridian.internal/shared/api"
)

// ClusterFlags are the options by which the components of one cluster know each other.
type ClusterFlags struct {
	ClusterToken string `help:"File with the secret that routers, nodes and clocksync share: 16 bytes or more. Nodes, KV connections and the embedded NATS server then take nobody else. Empty: they take everybody who reaches them." type:"path" placeholder:"FILE"`
	ClusterCert  string `help:"PEM file with this component's certificate: nodes serve HTTPS and KV over TLS with it, and everybody shows it when dialling. Needs --cluster-key and --cluster-ca." type:"path" placeholder:"FILE"`
	ClusterKey   string `help:"PEM file with its private key." type:"path" placeholder:"FILE"`
	ClusterCA    string `help:"PEM file with the authority that signed the certificates of all components: nobody else is taken or dialled." name:"cluster-ca" type:"path" placeholder:"FILE"`
}

// Cluster is what a component knows of the others' credentials. The zero value knows nothing, and takes everybody.
type Cluster struct {
	token string
	// Server is for listeners that components dial; Client for dialling components. Nil: plain TCP.
	Server, Client *tls.Config
}

const minToken, maxToken = 16, 512

// Open reads the files.
func (f ClusterFlags) Open() (*Cluster, error) {
	c := new(Cluster)
	if f.ClusterToken != "" {
		b, err := os.ReadFile(f.ClusterToken)
		if err != nil {
			return nil, fmt.Errorf("--cluster-token: %w", err)
		}
		c.token = strings.TrimSpace(string(b))
		if n := len(c.token); n < minToken || n > maxToken || strings.ContainsFunc(c.token, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return nil, fmt.Errorf("--cluster-token %s: want one line of %d to %d printable ASCII characters", f.ClusterToken, minToken, maxToken)
		}
	}
	given := 0
	for _, s := range []string{f.ClusterCert, f.ClusterKey, f.ClusterCA} {
		if s != "" {
			given++
		}
	}
	switch given {
	case 0:
		return c, nil
	case 3:
		return c, c.openTLS(f)
	}
	return nil, errors.New("--cluster-cert, --cluster-key, --cluster-ca: want all of them or none")
}

func (c *Cluster) openTLS(f ClusterFlags) error {
	pair, err := newCertificate("cluster", f.ClusterCert, f.ClusterKey)
	if err != nil {
		return err
	}
	b, err := os.ReadFile(f.ClusterCA)
	if err != nil {
		return fmt.Errorf("--cluster-ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(b) {
		return fmt.Errorf("--cluster-ca %s: no certificate in it", f.ClusterCA)
	}
	c.Server = &tls.Config{
		MinVersion: tls.VersionTLS13, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return pair.get() },
		// Health is answered to everybody; Allow and KVServer refuse who shows no certificate.
		ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: pool,
	}
	c.Client = &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: pool,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return pair.get() },
	}
	return nil
}

// TakesAll says whether everybody is taken for a component.
func (c *Cluster) TakesAll() bool { return c.token == "" && c.Server == nil }

// Token is the shared secret; "": none.
func (c *Cluster) Token() string { return c.token }

// Scheme is that of the URL at which components reach a node.
func (c *Cluster) Scheme() string {
	if c.Server != nil {
		return "https"
	}
	return "http"
}

// KVServer is for the KV listener: a receiver without a certificate does not get past the handshake. Nil: plain TCP.
func (c *Cluster) KVServer() *tls.Config {
	if c.Server == nil {
		return nil
	}
	t := c.Server.Clone()
	t.ClientAuth = tls.RequireAndVerifyClientCert
	t.SessionTicketsDisabled = true // a connection that waits for its next transfer is silent
	return t
}

// Key derives a key for one purpose from the secret, so that what leaks of one use helps nowhere else; nil: no secret.
func (c *Cluster) Key(purpose string) []byte {
	if c.token == "" {
		return nil
	}
	m := hmac.New(sha256.New, []byte(c.token))
	m.Write([]byte("meridian " + purpose))
	return m.Sum(nil)
}

// Authorization is the header that components send each other; "": none.
func (c *Cluster) Authorization() string {
	if c.token == "" {
		return ""
	}
	return "Bearer " + c.token
}

// challenge is how a node of a cluster with a secret asks for it: nobody else is to be told.
const challenge = `Bearer realm="meridian-cluster"`

// Allow refuses who does not belong to the cluster. It fits Options.Allow.
func (c *Cluster) Allow(r *http.Request) *api.Error {
	if c.Server != nil && (r.TLS == nil || len(r.TLS.VerifiedChains) == 0) {
		return &api.Error{Code: http.StatusForbidden, Type: api.TypePermission, Stage: "auth", Message: "this node takes only components with a certificate of its cluster"}
	}
	if c.token == "" {
		return nil
	}
	values := r.Header["Authorization"]
	if len(values) == 1 && subtle.ConstantTimeCompare([]byte(values[0]), []byte(c.Authorization())) == 1 {
		return nil
	}
	return &api.Error{
		Code: http.StatusUnauthorized, Type: api.TypeAuthentication, Stage: "auth", Challenge: challenge,
		Message: "this node takes only components that know its cluster's secret",
	}
}

// Transport shows the cluster's credentials to those who ask for them as our nodes do. A foreign worker, which does not, never
// sees the secret. base belongs to it from then on.
func (c *Cluster) Transport(base *http.Transport) http.RoundTripper {
	if c.Client != nil {
		base.TLSClientConfig = c.Client
	}
	if c.token == "" {
		return base
	}
	return &shower{c: c, base: base, ours: map[string]bool{}}
}

// shower remembers which hosts have asked for the secret.
type shower struct {
	c    *Cluster
	base *http.Transport

	mu   sync.Mutex // guards ours
	ours map[string]bool
}

const maxOurs = 16384

// RoundTrip sends the request; a second time with the secret, when a node that is new asks for it.
func (s *shower) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	ours := s.ours[r.URL.Host]
	s.mu.Unlock()
	if ours {
		return s.base.RoundTrip(s.with(r))
	}
	res, err := s.base.RoundTrip(r)
	if err != nil || res.StatusCode != http.StatusUnauthorized || res.Header.Get("WWW-Authenticate") != challenge {
		return res, err
	}
	again := s.with(r)
	if r.Body != nil && r.Body != http.NoBody {
		if r.GetBody == nil {
			return res, nil
		}
		if again.Body, err = r.GetBody(); err != nil {
			return res, nil
		}
	}
	_ = res.Body.Close()
	s.mu.Lock()
	if len(s.ours) >= maxOurs {
		clear(s.ours)
	}
	s.ours[r.URL.Host] = true
	s.mu.Unlock()
	return s.base.RoundTrip(again)
}

func (s *shower) with(r *http.Request) *http.Request {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", s.c.Authorization())
	return r
}

// CloseIdleConnections lets http.Client do so.
func (s *shower) CloseIdleConnections() { s.base.CloseIdleConnections() }
