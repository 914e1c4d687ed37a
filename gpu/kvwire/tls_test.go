package kvwire

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"testing"
	"time"

	"meridian.internal/shared/infer"
)

// authority is a CA that signs certificates of 127.0.0.1.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  ed25519.PrivateKey
	pool *x509.CertPool
}

func (a *authority) sign(template, parent *x509.Certificate, public ed25519.PublicKey) *x509.Certificate {
	a.t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	c, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{t: t, key: private, pool: x509.NewCertPool()}
	now := time.Now()
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	a.cert = a.sign(template, template, public)
	a.pool.AddCert(a.cert)
	return a
}

func (a *authority) leaf() tls.Certificate {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	now := time.Now()
	c := a.sign(&x509.Certificate{
		SerialNumber: big.NewInt(2), NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, a.cert, public)
	return tls.Certificate{Certificate: [][]byte{c.Raw}, PrivateKey: private}
}

// Real sockets: pipes would hide how a TLS connection that waits for its next transfer looks from below.
func TestKVTravelsOverMutualTLS(t *testing.T) {
	ours, others := newAuthority(t), newAuthority(t)
	h := hello("f32", 16)
	p := start(t, h, h)
	defer p.stop()
	p.server.o.Timing, p.client.o.Timing = patient.withDefaults(), patient.withDefaults()
	p.server.lease = time.Minute
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln := tls.NewListener(tcp, &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{ours.leaf()}, ClientCAs: ours.pool, ClientAuth: tls.RequireAndVerifyClientCert, SessionTicketsDisabled: true,
	})
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- p.server.Serve(ctx, ln) }()
	defer func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}()
	dials := 0
	with := func(roots *x509.CertPool, certificates ...tls.Certificate) func(context.Context, string) (net.Conn, error) {
		d := &tls.Dialer{Config: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: roots, Certificates: certificates}}
		return func(ctx context.Context, _ string) (net.Conn, error) {
			dials++
			return d.DialContext(ctx, "tcp", ln.Addr().String())
		}
	}
	fetch := func(id int64) error {
		o := p.offer(t, id, newPrefill(h, 100).run(30))
		defer o.Withdraw()
		o.Ready(someTrailer)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		c := &cache{h: h, got: map[infer.Span][]byte{}}
		_, _, err := p.fetch(ctx, id, 0, 100, c)
		if err == nil {
			c.check(t, 0, 100)
		} else if len(c.got) > 0 {
			t.Error("KV came in spite of the error")
		}
		return err
	}
	p.client.o.Dial = with(ours.pool)
	if fetch(1) == nil {
		t.Error("a receiver without a certificate was served")
	}
	p.client.o.Dial = with(ours.pool, others.leaf())
	if fetch(2) == nil {
		t.Error("a receiver with a certificate of another authority was served")
	}
	p.client.o.Dial = with(others.pool, ours.leaf())
	if fetch(3) == nil {
		t.Error("a sender of another authority was believed")
	}
	p.client.o.Dial = with(ours.pool, ours.leaf())
	dials = 0
	for id := range int64(3) {
		if err := fetch(10 + id); err != nil {
			t.Errorf("transfer %d between components: %v", id, err)
		}
	}
	if dials != 1 {
		t.Errorf("%d connections for three transfers in a row, want 1: one that is kept must look usable", dials)
	}
}
