// Package kvwire moves the KV of a prompt from the node that computed it to the node that decodes it: over TCP, or in place
// where both are processes of one host. It owns the frame codec, the handshake, the sender's leases (Server, Offer) and the
// receiver's pull (Client, Transfer). It knows neither HTTP nor the engine: an Export is read, a Sink is written.
// docs/wire-kv.md draws the format.
//
// Ownership: one connection serves one transfer at a time. On the sending side the goroutine of the connection reads,
// and one more sends while a request is pending. An Offer holds its Export until it is acknowledged, cancelled, or its
// deadline passes; whoever ends the Offer releases the Export, after the frame in flight.
package kvwire
