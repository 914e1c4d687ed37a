package model

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
)

// A tensor up to hashWhole bytes enters the hash whole; of a larger one, hashSamples evenly spaced pieces of hashPiece
// bytes, the first and the last piece among them. That keeps the cost of a checkpoint of 100 GB under a second.
const (
	hashWhole   = 64 << 10
	hashSamples = 16
	hashPiece   = 256
)

// hashModel is a function of what the folder holds, not of where or how it is stored: config, tokenizer, and for each
// tensor name, type, shape and (sampled) content. Shards do not enter.
func hashModel(m *Model) (string, error) {
	h := sha256.New()
	config, err := json.Marshal(m.Config)
	if err != nil {
		return "", fmt.Errorf("hash config: %w", err)
	}
	field(h, config)
	for _, doc := range [][]byte{m.TokenizerJSON, m.TokenizerConfigJSON, m.ChatTemplate} {
		field(h, doc)
	}
	for _, s := range m.slots() {
		t := *s.to
		field(h, fmt.Appendf(nil, "%s %s %v", t.Name, t.Type, t.Shape))
		if len(t.Data) <= hashWhole {
			h.Write(t.Data)
			continue
		}
		for i := range hashSamples {
			at := int(int64(len(t.Data)-hashPiece) * int64(i) / (hashSamples - 1))
			h.Write(t.Data[at : at+hashPiece])
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:8]), nil
}

// field writes a length before the bytes, so that no two lists of fields look alike.
func field(h hash.Hash, b []byte) {
	var n [8]byte
	binary.LittleEndian.PutUint64(n[:], uint64(len(b)))
	h.Write(n[:])
	h.Write(b)
}
