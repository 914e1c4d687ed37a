package serve

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/labstack/echo/v4"
)

const secret = "0123456789abcdef0123456789abcdef"

func tokenFile(t *testing.T, text string) ClusterFlags {
	t.Helper()
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return ClusterFlags{ClusterToken: path}
}

func openCluster(t *testing.T, f ClusterFlags) *Cluster {
	t.Helper()
	c, err := f.Open()
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestClusterTokenFile(t *testing.T) {
	if c := openCluster(t, tokenFile(t, secret+"\n")); c.Token() != secret || c.TakesAll() {
		t.Errorf("token %q", c.Token())
	}
	for name, text := range map[string]string{
		"a short secret": "short", "an empty file": "", "two lines": secret + "\n" + secret, "a long one": strings.Repeat("x", 600), "line ends for headers": secret + "\r\nX: y",
	} {
		if _, err := tokenFile(t, text).Open(); err == nil || !strings.Contains(err.Error(), "--cluster-token") || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: error %v; want one that names the option, not the secret", name, err)
		}
	}
	if _, err := (ClusterFlags{ClusterCert: "x"}).Open(); err == nil || !strings.Contains(err.Error(), "--cluster-ca") {
		t.Errorf("a certificate alone: %v", err)
	}
	if !openCluster(t, ClusterFlags{}).TakesAll() {
		t.Error("nothing configured, and not open")
	}
}

func TestKeysOfPurposesDiffer(t *testing.T) {
	c := openCluster(t, tokenFile(t, secret))
	if string(c.Key("kv")) == string(c.Key("clock")) || openCluster(t, ClusterFlags{}).Key("kv") != nil {
		t.Error("keys of two purposes are the same, or there is one without a secret")
	}
}

// node is a server as nodes run it.
func node(t *testing.T, c *Cluster) *running {
	return start(t, Options{Allow: c.Allow, TLS: c.Server}, func(e *echo.Echo) {
		e.POST("/steady_clock_offset", func(c echo.Context) error {
			b, _ := io.ReadAll(c.Request().Body)
			return c.String(200, string(b))
		})
	})
}

func push(t *testing.T, rt http.RoundTripper, url string, headers ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", url+"/steady_clock_offset", strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		req.Header.Add(headers[i], headers[i+1])
	}
	res, err := (&http.Client{Transport: rt, Timeout: time.Minute}).Do(req)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(res.Body)
	return res.StatusCode, string(b)
}

func TestNodesTakeOnlyThoseWhoKnowTheSecret(t *testing.T) {
	c := openCluster(t, tokenFile(t, secret))
	s := node(t, c)
	url := "http://" + s.Addr()
	for name, k := range map[string]struct {
		auth   []string
		status int
	}{
		"nothing": {nil, 401}, "the secret": {[]string{"Bearer " + secret}, 200}, "another": {[]string{"Bearer " + strings.ToUpper(secret)}, 401},
		"a part": {[]string{"Bearer " + secret[:20]}, 401}, "more": {[]string{"Bearer " + secret + "0"}, 401}, "no scheme": {[]string{secret}, 401},
		"twice": {[]string{"Bearer " + secret, "Bearer " + secret}, 401}, "a huge one": {[]string{"Bearer " + strings.Repeat("x", 30_000)}, 401},
	} {
		var h []string
		for _, a := range k.auth {
			h = append(h, "Authorization", a)
		}
		if status, body := push(t, http.DefaultTransport, url, h...); status != k.status {
			t.Errorf("%s: %d %s, want %d", name, status, body, k.status)
		}
	}
	rt := c.Transport(new(http.Transport), nil)
	for range 2 { // the second time without being asked
		if status, body := push(t, rt, url); status != 200 || body != "body" {
			t.Errorf("a component: %d %q, want 200 and the body that it sent", status, body)
		}
	}
	if status, _ := s.get(t, "/healthz"); status != 200 {
		t.Errorf("health: %d", status)
	}
}

// A foreign worker may ask for the secret as it likes: it knows none to prove, and the proof of a node that it passes on is for another
// address.
func TestAForeignWorkerNeverSeesTheSecret(t *testing.T) {
	c := openCluster(t, tokenFile(t, secret))
	ours := node(t, c)
	for name, asks := range map[string]func(r *http.Request) string{
		"as anybody":                        func(*http.Request) string { return "Bearer" },
		"as a node, without a proof":        func(*http.Request) string { return challenge },
		"as a node, with an empty proof":    func(*http.Request) string { return challenge + `, proof=""` },
		"with the proof of a node, relayed": func(r *http.Request) string { return relayed(t, ours, r.Header.Get(headerNonce)) },
	} {
		t.Run(name, func(t *testing.T) {
			seen := make(chan string, 10)
			worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				seen <- r.Header.Get("Authorization")
				w.Header().Set("WWW-Authenticate", asks(r))
				w.WriteHeader(401)
			}))
			defer worker.Close()
			rt := c.Transport(new(http.Transport), nil)
			for range 2 {
				push(t, rt, worker.URL)
				if got := <-seen; got != "" || c.Ours(worker.URL) {
					t.Errorf("it got %q", got)
				}
			}
			if status, _ := push(t, c.Transport(new(http.Transport), func(string) bool { return true }), worker.URL); name != "as anybody" && !c.Ours(worker.URL) {
				t.Errorf("one that is trusted does not get it: %d", status)
			}
		})
	}
	if c.Ours("http://" + ours.Addr()) {
		t.Error("it belongs to the cluster before anybody asked")
	}
	if push(t, c.Transport(new(http.Transport), nil), "http://"+ours.Addr()); !c.Ours("http://" + ours.Addr()) {
		t.Error("a node that proved that it knows the secret does not belong to the cluster")
	}
}

// relayed is how a node asks who comes with a nonce.
func relayed(t *testing.T, node *running, nonce string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), "POST", "http://"+node.Addr()+"/steady_clock_offset", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(headerNonce, nonce)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	return res.Header.Get("WWW-Authenticate")
}

// authority writes a CA and certificates of 127.0.0.1 that it signed, and gives the flags of a component.
func authority(t *testing.T) ClusterFlags {
	t.Helper()
	dir := t.TempDir()
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	sign := func(template, parent *x509.Certificate, key, by *ecdsa.PrivateKey) []byte {
		der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, by)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	newKey := func() *ecdsa.PrivateKey {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	now := time.Now()
	ca := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "ca"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	caKey, key := newKey(), newKey()
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "node"}, NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return ClusterFlags{
		ClusterCA:   write("ca.pem", "CERTIFICATE", sign(ca, ca, caKey, caKey)),
		ClusterCert: write("cert.pem", "CERTIFICATE", sign(leaf, ca, key, caKey)), ClusterKey: write("key.pem", "EC PRIVATE KEY", der),
	}
}

func TestMutualTLS(t *testing.T) {
	flags := authority(t)
	c := openCluster(t, flags)
	s := node(t, c)
	url := c.Scheme() + "://" + s.Addr()
	if status, body := push(t, c.Transport(new(http.Transport), nil), url); status != 200 {
		t.Errorf("a component: %d %s", status, body)
	}
	without := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: c.Client.RootCAs}}
	if status, body := push(t, without, url); status != 403 {
		t.Errorf("without a certificate: %d %s, want 403", status, body)
	}
	stranger := openCluster(t, authority(t))
	bad := stranger.Client.Clone()
	bad.RootCAs = c.Client.RootCAs
	if status, _ := push(t, &http.Transport{TLSClientConfig: bad}, url); status == 200 {
		t.Error("a certificate of another authority was taken")
	}
	if status, _ := push(t, stranger.Transport(new(http.Transport), nil), url); status != 0 {
		t.Error("a node of another authority was dialled")
	}
	old := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: c.Client.RootCAs, MaxVersion: tls.VersionTLS12}}
	if status, _ := push(t, old, url); status != 0 {
		t.Error("TLS 1.2 was taken between components")
	}
	if c.KVServer().ClientAuth != tls.RequireAndVerifyClientCert {
		t.Error("KV listeners take receivers without a certificate")
	}
}

func TestARenewedCertificateIsUsed(t *testing.T) {
	first, second := authority(t), authority(t)
	conf, err := TLSFlags{TLSCert: first.ClusterCert, TLSKey: first.ClusterKey}.Config()
	if err != nil {
		t.Fatal(err)
	}
	c, err := newCertificate("tls", first.ClusterCert, first.ClusterKey)
	if err != nil {
		t.Fatal(err)
	}
	before, _ := c.get()
	for _, pair := range [][2]string{{second.ClusterCert, first.ClusterCert}, {second.ClusterKey, first.ClusterKey}} {
		b, err := os.ReadFile(pair[0])
		if err == nil {
			err = os.WriteFile(pair[1], b, 0o600)
		}
		if err == nil {
			err = os.Chtimes(pair[1], time.Time{}, time.Now().Add(time.Hour))
		}
		if err != nil {
			t.Fatal(err)
		}
		c.checked = time.Time{}
		after, _ := c.get()
		if whole := pair[0] == second.ClusterKey; whole == (string(after.Certificate[0]) == string(before.Certificate[0])) {
			t.Errorf("after %s: renewed certificate in use: %v", filepath.Base(pair[1]), !whole)
		}
	}
	if conf.MinVersion < tls.VersionTLS12 {
		t.Errorf("the public API takes TLS version %x", conf.MinVersion)
	}
	if _, err := (TLSFlags{TLSCert: "x"}).Config(); err == nil {
		t.Error("a certificate without its key was taken")
	}
}
