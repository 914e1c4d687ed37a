package kvwire

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
)

// ErrStranger is returned when the other side does not know the secret of this cluster.
var ErrStranger = errors.New("kvwire: the peer does not know this cluster's secret")

// Proof is the payload of the frame with which a receiver proves that it knows the secret.
type Proof struct {
	Proof string `json:"proof"`
}

const nonceBytes = 16

// newNonce makes what the other side must answer; "" without a secret.
func newNonce(key []byte) string {
	if key == nil {
		return ""
	}
	var b [nonceBytes]byte
	_, _ = rand.Read(b[:]) // never fails: it crashes the program instead
	return hex.EncodeToString(b[:])
}

// prove is HMAC-SHA-256(key, role "\n" receiver's nonce "\n" sender's nonce) in hex. The role keeps one side's proof from being
// sent back to it, the nonces keep a proof from being used again.
func prove(key []byte, role, receiver, sender string) string {
	m := hmac.New(sha256.New, key)
	fmt.Fprintf(m, "%s\n%s\n%s", role, receiver, sender)
	return hex.EncodeToString(m.Sum(nil))
}

const (
	roleReceiver = "receiver"
	roleSender   = "sender"
)

// checkProof compares in constant time. A nonce of another length is refused: it was not made by newNonce.
func checkProof(key []byte, role, receiver, sender, proof string) error {
	if len(receiver) != 2*nonceBytes || len(sender) != 2*nonceBytes || !hmac.Equal([]byte(proof), []byte(prove(key, role, receiver, sender))) {
		return ErrStranger
	}
	return nil
}

// answerHello is the sender's hello-ack: with a secret it proves that it knows it, and asks for the same.
func (s *Server) answerHello(peer Hello) Hello {
	h := s.o.Hello
	if s.o.Key != nil {
		h.Nonce = newNonce(s.o.Key)
		h.Proof = prove(s.o.Key, roleSender, peer.Nonce, h.Nonce)
	}
	return h
}

// takeProof reads the receiver's proof. Until then nothing of it is served.
func (n *session) takeProof(ack Hello) error {
	h, payload, err := readFrame(n.l.r, nil, only(TypeProof))
	if err != nil {
		return fmt.Errorf("read proof: %w", err)
	}
	p, err := parseJSON[Proof](h.Type, payload)
	if err != nil {
		return err
	}
	return checkProof(n.s.o.Key, roleReceiver, n.peer.Nonce, ack.Nonce, p.Proof)
}

// exchangeProofs is the receiver's side of it.
func (c *Client) exchangeProofs(l *link, nonce string, ack Hello) error {
	if err := checkProof(c.o.Key, roleSender, nonce, ack.Nonce, ack.Proof); err != nil {
		return err
	}
	return l.sendJSON(TypeProof, 0, Proof{prove(c.o.Key, roleReceiver, nonce, ack.Nonce)})
}
