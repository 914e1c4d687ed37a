package bus

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

const (
	phaseMaxBytes   = 1 << 30
	phaseSmallBytes = 64 << 20 // where the disk is small
	phaseMaxAge     = 24 * time.Hour
	// phaseDuplicates is how long a resent record is recognised by its message id. A publisher resends at most the one
	// batch whose acknowledgement was lost, as soon as it can reach the server.
	phaseDuplicates = 10 * time.Minute
	clockMaxAge     = time.Hour
	clockMaxBytes   = 32 << 20
	maxMessage      = 1 << 20
	nodesTTL        = 10 * time.Second // a lease is dead long before: LeaseTTL of shared/node
)

// EnsureStreams makes the streams and buckets, or changes them to what this version wants. Several processes may do so
// at the same time.
func EnsureStreams(ctx context.Context, js jetstream.JetStream) error {
	if err := ensureStream(ctx, js, phaseStream(phaseMaxBytes)); err != nil {
		if err := ensureStream(ctx, js, phaseStream(phaseSmallBytes)); err != nil {
			return err
		}
	}
	if err := ensureStream(ctx, js, clockStream()); err != nil {
		return err
	}
	for _, b := range buckets() {
		if err := ensureBucket(ctx, js, b); err != nil {
			return err
		}
	}
	return nil
}

func phaseStream(maxBytes int64) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: StreamPhases, Subjects: []string{SubjectPhases}, Description: "phase records on their way to the routers",
		Storage: jetstream.FileStorage, MaxBytes: maxBytes, MaxAge: phaseMaxAge, MaxMsgSize: maxMessage,
		Duplicates: phaseDuplicates, AllowDirect: true,
	}
}

func clockStream() jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name: StreamClockLog, Subjects: []string{SubjectClock}, Description: "an hour of clock estimates",
		Storage: jetstream.FileStorage, MaxBytes: clockMaxBytes, MaxAge: clockMaxAge, MaxMsgSize: maxMessage,
		AllowDirect: true,
	}
}

// buckets are kept in memory: what they hold is put again within seconds after a restart of the server, and an old entry
// of a process that is gone must not come back. Bequests are of processes that are gone, and wait as long as records do.
func buckets() []jetstream.KeyValueConfig {
	return []jetstream.KeyValueConfig{
		{Bucket: BucketNodes, Description: "registrations", Storage: jetstream.MemoryStorage, TTL: nodesTTL, History: 1},
		{Bucket: BucketAdoptions, Description: "leases on the records of routers that are gone", Storage: jetstream.MemoryStorage, TTL: nodesTTL, History: 1},
		{Bucket: BucketBequests, Description: "lines written for routers that are gone", Storage: jetstream.FileStorage, TTL: phaseMaxAge, History: 1},
		{Bucket: BucketClocks, Description: "newest clock estimates", Storage: jetstream.MemoryStorage, History: 1},
	}
}

func ensureStream(ctx context.Context, js jetstream.JetStream, cfg jetstream.StreamConfig) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	// An existing stream is left alone when it is there: an operator may have given it replicas or another size.
	if _, err := js.Stream(ctx, cfg.Name); err == nil {
		return nil
	} else if !errors.Is(err, jetstream.ErrStreamNotFound) {
		return fmt.Errorf("look up stream %s: %w", cfg.Name, err)
	}
	if _, err := js.CreateStream(ctx, cfg); err != nil && !errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
		return fmt.Errorf("make stream %s of %d MiB: %w", cfg.Name, cfg.MaxBytes>>20, err)
	}
	return nil
}

func ensureBucket(ctx context.Context, js jetstream.JetStream, cfg jetstream.KeyValueConfig) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if _, err := js.KeyValue(ctx, cfg.Bucket); err == nil {
		return nil
	} else if !errors.Is(err, jetstream.ErrBucketNotFound) {
		return fmt.Errorf("look up bucket %s: %w", cfg.Bucket, err)
	}
	if _, err := js.CreateKeyValue(ctx, cfg); err != nil && !errors.Is(err, jetstream.ErrBucketExists) {
		return fmt.Errorf("make bucket %s: %w", cfg.Bucket, err)
	}
	return nil
}
