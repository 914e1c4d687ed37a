package model

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
)

// WriteRandom writes a checkpoint folder with random weights for a config.json: for benchmarks of sizes that nobody
// wants to download, and for comparisons between implementations. The weights are a function of config and seed, of the
// type that the config names (dtype or torch_dtype; bf16 if none). Matrices have the variance 1/in, so that activations
// keep their size through the layers; norms are near 1, biases near 0. It streams: memory does not grow with the model.
func WriteRandom(dir string, configJSON []byte, seed uint64) error {
	c, err := ParseConfig(configJSON)
	if err != nil {
		return err
	}
	dtype, ok := map[string]DType{"": BF16, "bfloat16": BF16, "float16": F16, "float32": F32}[c.dtype]
	if !ok {
		return unsupported("dtype", fmt.Sprintf("%q", c.dtype), "must be bfloat16, float16 or float32")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	tokenizer, tokenizerConfig, err := tokenizerFor(c)
	if err != nil {
		return err
	}
	for name, data := range map[string][]byte{
		"config.json": configJSON, "tokenizer.json": tokenizer, "tokenizer_config.json": tokenizerConfig,
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			return err
		}
	}
	return writeRandomTensors(filepath.Join(dir, "model.safetensors"), c, dtype, seed)
}

func writeRandomTensors(path string, c *Config, dtype DType, seed uint64) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	m := &Model{Config: *c, Layers: make([]Layer, c.Layers)}
	slots := m.slots()
	header, err := randomHeader(slots, dtype)
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<20)
	if _, err := w.Write(header); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	rng := noise(seed)
	for _, s := range slots {
		if err := writeRandomTensor(w, s.shape, dtype, &rng); err != nil {
			return fmt.Errorf("write %s to %s: %w", s.name, path, err)
		}
	}
	return w.Flush()
}

func randomHeader(slots []slot, dtype DType) ([]byte, error) {
	type tensor struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	entries := map[string]any{"__metadata__": map[string]string{"format": "pt"}}
	at := 0
	for _, s := range slots {
		t := Tensor{Shape: s.shape}
		end := at + t.Elements()*dtype.Size()
		entries[s.name] = tensor{dtype.String(), s.shape, [2]int{at, end}}
		at = end
	}
	data, err := json.Marshal(entries)
	if err != nil {
		return nil, err
	}
	for len(data)%8 != 0 { // as the reference writer pads, so that the data is aligned
		data = append(data, ' ')
	}
	return append(binary.LittleEndian.AppendUint64(nil, uint64(len(data))), data...), nil
}

// writeRandomTensor draws uniformly: matrices from ±sqrt(3/in), vectors from centre ± 0.1 where a norm's centre is 1. A
// bias gets the same values as a norm; that is far from what training gives, and just as good to tell kernels apart.
func writeRandomTensor(w *bufio.Writer, shape []int, dtype DType, rng *noise) error {
	centre, scale := 1.0, 0.1
	if len(shape) == 2 {
		centre, scale = 0, math.Sqrt(3/float64(shape[1]))
	}
	t := Tensor{Shape: shape}
	var buf [8]byte
	for range t.Elements() {
		v := float32(centre + scale*rng.next())
		var b []byte
		switch dtype {
		case F32:
			b = binary.LittleEndian.AppendUint32(buf[:0], math.Float32bits(v))
		case F16:
			b = binary.LittleEndian.AppendUint16(buf[:0], Float32ToF16(v))
		default:
			b = binary.LittleEndian.AppendUint16(buf[:0], Float32ToBF16(v))
		}
		if _, err := w.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// noise is splitmix64: one addition and a mix for each number, which keeps the writing of a large model near disk speed.
type noise uint64

// next is uniform in [-1, 1).
func (n *noise) next() float64 {
	*n += 0x9e3779b97f4a7c15
	z := uint64(*n)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return float64(int64(z^z>>31)) * (1.0 / (1 << 63))
}

// tokenizerFor gives the embedded model's tokenizer when the vocabulary has its size, else a trivial one.
func tokenizerFor(c *Config) (tokenizer, config []byte, err error) {
	if tiny, err := Load(""); err != nil {
		return nil, nil, err
	} else if tiny.Config.Vocab == c.Vocab {
		return tiny.TokenizerJSON, tiny.TokenizerConfigJSON, nil
	}
	tokenizer, err = trivialTokenizer(c.Vocab)
	return tokenizer, []byte("{}\n"), err
}

// trivialTokenizer is a byte-level BPE without merges: ids below 256 are the bytes, each later id is a word of its own
// that only decoding meets.
func trivialTokenizer(vocab int) ([]byte, error) {
	ids := make(map[string]int, vocab)
	letters := byteLetters()
	for i := range vocab {
		if i < len(letters) {
			ids[string(letters[i])] = i
		} else {
			ids[fmt.Sprintf("Ġw%d", i)] = i
		}
	}
	byteLevel := map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}
	return json.Marshal(map[string]any{
		"version": "1.0", "truncation": nil, "padding": nil, "added_tokens": []any{}, "normalizer": nil,
		"pre_tokenizer": byteLevel, "post_processor": nil, "decoder": byteLevel,
		"model": map[string]any{
			"type": "BPE", "dropout": nil, "unk_token": nil, "continuing_subword_prefix": nil, "end_of_word_suffix": nil,
			"fuse_unk": false, "byte_fallback": false, "ignore_merges": false, "vocab": ids, "merges": []any{},
		},
	})
}

// byteLetters is the printable letter that byte-level BPE gives each byte: itself if it is printable, else the next free
// code point from 256 on.
func byteLetters() [256]rune {
	var out [256]rune
	next := rune(256)
	for b := range out {
		switch {
		case b >= '!' && b <= '~', b >= 0xa1 && b <= 0xac, b >= 0xae:
			out[b] = rune(b)
		default:
			out[b] = next
			next++
		}
	}
	return out
}
