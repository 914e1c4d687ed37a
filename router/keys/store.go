package keys

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"
)

// Store holds the keys of a file and follows its changes. Safe for concurrent use.
type Store struct {
	path string
	log  *slog.Logger

	mu   sync.RWMutex // guards what follows
	seen stamp        // of the file that is in force, or that was refused
	byID map[string]*Principal
	sums map[digest]entry
	bad  error // why the file that is there now is not in force; nil: it is
}

// entry is one key of the file in force.
type entry struct {
	sum       digest
	principal *Principal
	admin     bool
}

// stamp tells versions of a file apart without reading it.
type stamp struct {
	mod   time.Time
	size  int64
	inode any
}

// Open reads the file.
func Open(path string, log *slog.Logger) (*Store, error) {
	s := &Store{path: path, log: log}
	if err := s.load(); err != nil {
		return nil, err
	}
	return s, nil
}

// reloadEvery is how often the file is looked at.
const reloadEvery = time.Second

// Run takes over changes of the file until ctx ends. A file that cannot be used changes nothing: the keys before it stay
// in force, one line in the log says so, and Err does until it is repaired.
func (s *Store) Run(ctx context.Context) error {
	tick := time.NewTicker(reloadEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			s.Reload()
		}
	}
}

// Reload reads the file if it has changed.
func (s *Store) Reload() {
	now, err := stampOf(s.path)
	s.mu.RLock()
	same := err == nil && now == s.seen || err != nil && s.bad != nil
	before := s.bad
	s.mu.RUnlock()
	if same {
		return
	}
	if err := s.load(); err != nil {
		if before != nil && before.Error() == s.Err().Error() {
			return // said already
		}
		s.log.Error("API keys are not reloaded; the keys before stay in force", "file", s.path, "error", err)
		return
	}
	s.log.Info("API keys reloaded", "file", s.path, "keys", s.Len())
}

// Err is why the file that is there now is not in force; nil when it is.
func (s *Store) Err() error {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.bad
}

// Len counts the keys.
func (s *Store) Len() int {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return len(s.sums)
}

func (s *Store) load() error {
	now, b, err := read(s.path)
	var list []Key
	var sums []digest
	if err == nil {
		list, sums, err = parse(b)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen, s.bad = now, err
	if err != nil && !errors.Is(err, ErrFile) {
		s.seen = stamp{} // it could not be read: that may pass without a change of the file
	}
	if err != nil {
		return fmt.Errorf("--api-keys %s: %w", s.path, err)
	}
	byID, entries := make(map[string]*Principal, len(list)), make(map[digest]entry, len(list))
	for i, k := range list {
		p := s.byID[k.ID]
		if p == nil {
			p = &Principal{}
		}
		p.mu.Lock()
		p.key = k
		p.mu.Unlock()
		byID[k.ID], entries[sums[i]] = p, entry{sums[i], p, k.Admin}
	}
	s.byID, s.sums = byID, entries
	return nil
}

func read(path string) (stamp, []byte, error) {
	now, err := stampOf(path) // before reading: a change meanwhile is seen the next time
	if err != nil {
		return now, nil, err
	}
	f, err := os.Open(path)
	if err != nil {
		return now, nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err == nil && len(b) > maxFile {
		err = fmt.Errorf("%w: over %d bytes", ErrFile, maxFile)
	}
	return now, b, err
}

func stampOf(path string) (stamp, error) {
	i, err := os.Stat(path)
	if err != nil {
		return stamp{}, err
	}
	if !i.Mode().IsRegular() {
		return stamp{}, errors.New("not a regular file")
	}
	return stamp{mod: i.ModTime(), size: i.Size(), inode: inodeOf(i)}, nil
}

// maxSecret bounds what is hashed of a request that nobody knows yet.
const maxSecret = 512

// Find gives the principal of a key, and whether it is an administrator's; nil when no such key is in force.
//
// Only the SHA-256 of what was sent is compared. The map's own comparison is not constant in time, but what it could tell is
// how much of that hash agrees with a stored one, which leads to no key without inverting SHA-256; the last word is a
// comparison in constant time.
func (s *Store) Find(secret string) (p *Principal, admin bool) {
	if secret == "" || len(secret) > maxSecret {
		return nil, false
	}
	sum := digest(sha256.Sum256([]byte(secret)))
	s.mu.RLock()
	e, ok := s.sums[sum]
	s.mu.RUnlock()
	if !ok || subtle.ConstantTimeCompare(e.sum[:], sum[:]) != 1 {
		return nil, false
	}
	return e.principal, e.admin
}
