package serve

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
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

	mu   sync.Mutex      // guards ours
	ours map[string]bool // hosts that have shown that they belong to it
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

// challenge is how a node of a cluster with a secret asks for it. A proof follows that the node knows it already, for the asker's
// nonce and the address at which the node was reached: nobody else can give it, nor pass on that of a node.
const challenge = `Bearer realm="meridian-cluster"`

// headerNonce is sent to who is not known to belong to the cluster yet.
const headerNonce = "X-Meridian-Nonce"

// proof is that of who listens at an address; "": there is no secret, or something is missing.
func (c *Cluster) proof(nonce, address string) string {
	if c.token == "" || len(nonce) < minToken || len(nonce) > maxToken || address == "" {
		return ""
	}
	m := hmac.New(sha256.New, c.Key("proof"))
	m.Write([]byte(nonce + " " + address))
	return hex.EncodeToString(m.Sum(nil))
}

// ask is the challenge for a request.
func (c *Cluster) ask(r *http.Request) string {
	at, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if at == nil {
		return challenge
	}
	return challenge + `, proof="` + c.proof(r.Header.Get(headerNonce), at.String()) + `"`
}

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
		Code: http.StatusUnauthorized, Type: api.TypeAuthentication, Stage: "auth", Challenge: c.ask(r),
		Message: "this node takes only components that know its cluster's secret",
	}
}

// Transport shows the cluster's credentials to those who ask for them as our nodes do, and are in a trusted list (nil: there is none)
// or prove that they know them. A foreign worker never sees the secret. base belongs to it from then on.
func (c *Cluster) Transport(base *http.Transport, trusted func(host string) bool) http.RoundTripper {
	if c.Client != nil {
		base.TLSClientConfig = c.Client
	}
	if c.token == "" {
		return base
	}
	return &shower{c: c, base: base, trusted: trusted}
}

// Ours says whether who serves a URL has shown that it belongs to the cluster. Without a secret there is nothing to show.
func (c *Cluster) Ours(target string) bool {
	u, err := url.Parse(target)
	return err == nil && (c.token == "" || c.knows(u.Host))
}

func (c *Cluster) knows(host string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ours[host]
}

const maxOurs = 16384

func (c *Cluster) learn(host string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ours == nil || len(c.ours) >= maxOurs {
		c.ours = map[string]bool{}
	}
	c.ours[host] = true
}

// shower shows the secret.
type shower struct {
	c       *Cluster
	base    *http.Transport
	trusted func(host string) bool
}

// RoundTrip sends the request; a second time with the secret, when a node that is new asks for it.
func (s *shower) RoundTrip(r *http.Request) (*http.Response, error) {
	if s.c.knows(r.URL.Host) {
		return s.base.RoundTrip(s.with(r))
	}
	nonce, reached := rand.Text(), ""
	first := r.Clone(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) { reached = i.Conn.RemoteAddr().String() }}))
	first.Header.Set(headerNonce, nonce)
	res, err := s.base.RoundTrip(first)
	if err != nil || res.StatusCode != http.StatusUnauthorized || !s.believes(r.URL.Host, res.Header.Get("WWW-Authenticate"), s.c.proof(nonce, reached)) {
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
	s.c.learn(r.URL.Host)
	return s.base.RoundTrip(again)
}

// believes says whether who asks for the secret may have it.
func (s *shower) believes(host, asked, proof string) bool {
	rest, ours := strings.CutPrefix(asked, challenge)
	if !ours {
		return false
	}
	if s.trusted != nil && s.trusted(host) {
		return true
	}
	return proof != "" && subtle.ConstantTimeCompare([]byte(rest), []byte(`, proof="`+proof+`"`)) == 1
}

func (s *shower) with(r *http.Request) *http.Request {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", s.c.Authorization())
	return r
}

// CloseIdleConnections lets http.Client do so.
func (s *shower) CloseIdleConnections() { s.base.CloseIdleConnections() }
