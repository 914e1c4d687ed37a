package bus

import (
	"context"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// TestAFullDiskThatHasRoomAgainIsWrittenAgain: the server gives up a stream for good at the first write that its disk refuses.
func TestAFullDiskThatHasRoomAgainIsWrittenAgain(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=24m"); err != nil {
		t.Skip("a small disk cannot be mounted (needs root): ", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, 0) })
	e := startServer(t, "127.0.0.1:0", dir)
	defer e.Close()
	inside, err := Connect(t.Context(), Options{Server: e, Name: "inside", Logger: quiet, NoEnsure: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(inside.Close)
	outside, err := Connect(t.Context(), Options{URL: e.URL(), Name: "outside", Logger: quiet, NoEnsure: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(outside.Close)
	ctx := within(t)
	publish := func(c *Conn) error {
		ctx, cancel := context.WithTimeout(ctx, time.Second) // a stream that was given up does not answer
		defer cancel()
		_, err := c.JetStream().Publish(ctx, "kept", make([]byte, 10_000))
		return err
	}
	if _, err := inside.JetStream().CreateStream(ctx, jetstream.StreamConfig{Name: "KEPT", Subjects: []string{"kept"}, MaxBytes: 4 << 20}); err != nil {
		t.Fatal(err)
	}
	if err := publish(inside); err != nil {
		t.Fatal(err)
	}
	fill := filepath.Join(dir, "fill")
	if err := os.WriteFile(fill, make([]byte, 24<<20), 0o600); err == nil {
		t.Fatal("the disk is not full")
	}
	for publish(outside) == nil {
	}
	if err := os.Remove(fill); err != nil {
		t.Fatal(err)
	}
	for _, c := range []*Conn{inside, outside} {
		for err := publish(c); err != nil; err = publish(c) {
			if ctx.Err() != nil {
				t.Fatalf("nothing is written though there is room: %v", err)
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	s, err := inside.JetStream().Stream(ctx, "KEPT")
	if err != nil {
		t.Fatal(err)
	}
	if n := s.CachedInfo().State.Msgs; n < 3 {
		t.Errorf("%d messages are in the stream, want those from before too", n)
	}
}
