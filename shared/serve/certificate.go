package serve

import (
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// TLSFlags are the options of a face for clients.
type TLSFlags struct {
	TLSCert string `help:"PEM file with the certificate of the public API, and its chain; it is followed while serving. Empty: plain HTTP." name:"tls-cert" type:"path" placeholder:"FILE"`
	TLSKey  string `help:"PEM file with its private key." name:"tls-key" type:"path" placeholder:"FILE"`
}

// Config is that of the listener; nil: plain HTTP.
func (f TLSFlags) Config() (*tls.Config, error) {
	if f.TLSCert == "" && f.TLSKey == "" {
		return nil, nil
	}
	if f.TLSCert == "" || f.TLSKey == "" {
		return nil, errors.New("--tls-cert, --tls-key: want both or none")
	}
	c, err := newCertificate("tls", f.TLSCert, f.TLSKey)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return c.get() },
	}, nil
}

// certificate follows the files of a pair: a renewed one is used from the next handshake on, a broken one never.
type certificate struct {
	cert, key string

	mu      sync.Mutex // guards what follows; held while the files are read, once a second at most
	pair    *tls.Certificate
	mods    [2]time.Time
	checked time.Time
}

const certificateEvery = time.Second

func newCertificate(option, cert, key string) (*certificate, error) {
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("--%s-cert %s, --%s-key %s: %w", option, cert, option, key, err)
	}
	c := &certificate{cert: cert, key: key, pair: &pair, checked: time.Now()}
	c.mods = c.times()
	return c, nil
}

func (c *certificate) times() (t [2]time.Time) {
	for i, path := range []string{c.cert, c.key} {
		if info, err := os.Stat(path); err == nil {
			t[i] = info.ModTime()
		}
	}
	return t
}

func (c *certificate) get() (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.checked) < certificateEvery {
		return c.pair, nil
	}
	c.checked = time.Now()
	if now := c.times(); now != c.mods {
		if pair, err := tls.LoadX509KeyPair(c.cert, c.key); err == nil { // half written: the next look finds it whole
			c.pair, c.mods = &pair, now
		}
	}
	return c.pair, nil
}
