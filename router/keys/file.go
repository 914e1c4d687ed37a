package keys

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"

	"gopkg.in/yaml.v3"
)

// ErrFile is returned when a file of keys cannot be used; the text says which entry and why.
var ErrFile = errors.New("keys: bad file")

const (
	maxFile = 8 << 20 // bytes: 30,000 keys
	maxID   = 64
	maxRate = 1_000_000_000
)

// Key is one entry of the file. A limit that is absent or 0 does not apply.
type Key struct {
	ID                string   `yaml:"id"`                  // names the principal in records, logs and metrics: letters, digits, -_.
	SHA256            string   `yaml:"sha256"`              // of the key's bytes, in hex
	Admin             bool     `yaml:"admin"`               // may see /cluster, /timelines, /metrics and the web page
	Models            []string `yaml:"models"`              // that it may use; absent: all
	RequestsPerMinute int      `yaml:"requests_per_minute"` // a burst of one minute's worth is let through
	TokensPerMinute   int      `yaml:"tokens_per_minute"`   // prompt and output; counted when a request ends
	MaxRunning        int      `yaml:"max_running"`         // requests at the same time
	MaxPriority       *int     `yaml:"max_priority"`        // a higher priority of a request is lowered to it, and with one below 1 nothing is pinned; absent: not lowered
}

type digest [sha256.Size]byte

// Parse reads a file of keys: YAML (or JSON), {keys: [...]}. Unknown and repeated members are refused, since a misspelt
// limit would be no limit.
func Parse(b []byte) ([]Key, error) {
	keys, _, err := parse(b)
	return keys, err
}

func parse(b []byte) ([]Key, []digest, error) {
	var file struct {
		Keys []Key `yaml:"keys"`
	}
	if err := bounded(b); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrFile, err)
	}
	d := yaml.NewDecoder(bytes.NewReader(b))
	d.KnownFields(true)
	if err := d.Decode(&file); err != nil {
		return nil, nil, fmt.Errorf("%w: want keys: [{id, sha256, ...}]: %w", ErrFile, err)
	}
	if err := d.Decode(new(any)); !errors.Is(err, io.EOF) {
		return nil, nil, fmt.Errorf("%w: more than one YAML document", ErrFile)
	}
	if len(file.Keys) == 0 {
		return nil, nil, fmt.Errorf("%w: no keys; without --api-keys everything is open", ErrFile)
	}
	digests := make([]digest, len(file.Keys))
	ids, sums := map[string]bool{}, map[digest]bool{}
	for i := range file.Keys {
		k := &file.Keys[i]
		sum, err := k.check()
		switch {
		case err != nil:
			return nil, nil, fmt.Errorf("%w: keys[%d] (id %q): %w", ErrFile, i, k.ID, err)
		case ids[k.ID]:
			return nil, nil, fmt.Errorf("%w: keys[%d]: id %q is given twice", ErrFile, i, k.ID)
		case sums[sum]:
			return nil, nil, fmt.Errorf("%w: keys[%d] (id %q): another id has the same sha256", ErrFile, i, k.ID)
		}
		ids[k.ID], sums[sum], digests[i] = true, true, sum
	}
	return file.Keys, digests, nil
}

const (
	maxMembers = 32 // of one mapping: the decoder compares each with each
	maxDepth   = 8
)

// bounded refuses what would take the decoder long: aliases, nesting and mappings that no file of keys has.
func bounded(b []byte) error {
	d := yaml.NewDecoder(bytes.NewReader(b))
	for {
		var n yaml.Node
		if err := d.Decode(&n); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := boundedNode(&n, 0); err != nil {
			return err
		}
	}
}

func boundedNode(n *yaml.Node, depth int) error {
	switch {
	case n.Kind == yaml.AliasNode:
		return fmt.Errorf("line %d: aliases are not taken", n.Line)
	case depth > maxDepth:
		return fmt.Errorf("line %d: nested over %d levels", n.Line, maxDepth)
	case n.Kind == yaml.MappingNode && len(n.Content) > 2*maxMembers:
		return fmt.Errorf("line %d: %d members: want %d at most", n.Line, len(n.Content)/2, maxMembers)
	}
	for i, c := range n.Content {
		if n.Kind == yaml.MappingNode && i%2 == 1 && c.Tag == "!!null" {
			return fmt.Errorf("line %d: %s has no value; leave it out where nothing is meant", c.Line, n.Content[i-1].Value)
		}
		if err := boundedNode(c, depth+1); err != nil {
			return err
		}
	}
	return nil
}

func (k *Key) check() (digest, error) {
	var sum digest
	if !validID(k.ID) {
		return sum, fmt.Errorf("id: want 1 to %d letters, digits, dots, dashes or underscores", maxID)
	}
	raw, err := hex.DecodeString(k.SHA256)
	if err != nil || len(raw) != len(sum) {
		return sum, fmt.Errorf("sha256: want the %d hex digits of the key's SHA-256", 2*len(sum))
	}
	for _, l := range []struct {
		name string
		n    int
	}{{"requests_per_minute", k.RequestsPerMinute}, {"tokens_per_minute", k.TokensPerMinute}, {"max_running", k.MaxRunning}} {
		if l.n < 0 || l.n > maxRate {
			return sum, fmt.Errorf("%s: %d: want 0 (no limit) to %d", l.name, l.n, maxRate)
		}
	}
	if k.Models != nil && len(k.Models) == 0 {
		return sum, errors.New("models is empty; leave it out for a key that may use all")
	}
	for _, m := range k.Models {
		if m == "" {
			return sum, errors.New("models: an empty name")
		}
	}
	return digest(raw), nil
}

func validID(s string) bool {
	if s == "" || len(s) > maxID {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '-', c == '_', c == '.':
		default:
			return false
		}
	}
	return true
}
