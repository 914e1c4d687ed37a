package collect

import (
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// The bodies of acknowledgements in JetStream's protocol.
var (
	bodyAck        = []byte("+ACK")
	bodyNak        = []byte("-NAK")
	bodyInProgress = []byte("+WPI")
)

// streamAck acknowledges a message by the subject to reply to. The message itself, with its text, need not stay in memory
// while its request waits.
type streamAck struct {
	nc    *nats.Conn
	reply string
}

func newStreamAck(nc *nats.Conn, msg jetstream.Msg) streamAck {
	return streamAck{nc: nc, reply: strings.Clone(msg.Reply())}
}

// Ack says that the record is safe.
func (a streamAck) Ack() error { return a.nc.Publish(a.reply, bodyAck) }

// Nak gives the record back: the stream brings it again at once.
func (a streamAck) Nak() error { return a.nc.Publish(a.reply, bodyNak) }

// InProgress says that the record is still wanted.
func (a streamAck) InProgress() error { return a.nc.Publish(a.reply, bodyInProgress) }
