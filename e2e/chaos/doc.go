// Package chaos holds tests that run the real binaries and hurt them: kill, stop, drain, cut off NATS, leave as a client.
// It holds nothing else. The tests need the binaries of "make build" and are skipped without them.
package chaos
