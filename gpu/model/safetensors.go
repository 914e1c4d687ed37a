package model

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
)

// ErrSafetensors is wrapped by every error that says that a file is not a valid safetensors file.
var ErrSafetensors = errors.New("model: not a valid safetensors file")

// maxHeader bounds the header, as the format does.
const maxHeader = 100 << 20

// entry is one tensor as a safetensors header describes it.
type entry struct {
	name  string
	dtype string
	shape []int
	data  []byte // lies in the file's bytes
}

// parseSafetensors reads
//
//	u64 little endian: n | n bytes of JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": …} | data
//
// where the offsets count from the start of the data. As the format asks, the tensors must cover the data without holes
// and without overlap. Nothing is allocated by a length that the file claims: entries grow with the JSON that is really
// there, and the tensors stay in place.
func parseSafetensors(file []byte) ([]entry, error) {
	if len(file) < 8 {
		return nil, fmt.Errorf("%w: %d bytes, the length of the header alone needs 8", ErrSafetensors, len(file))
	}
	n := binary.LittleEndian.Uint64(file)
	if n > maxHeader || n > uint64(len(file)-8) {
		return nil, fmt.Errorf("%w: header of %d bytes in a file of %d (limit %d)", ErrSafetensors, n, len(file), maxHeader)
	}
	data := file[8+n:]
	raw, err := parseHeader(file[8 : 8+n])
	if err != nil {
		return nil, fmt.Errorf("%w: header: %w", ErrSafetensors, err)
	}
	if err := checkCover(raw, uint64(len(data))); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrSafetensors, err)
	}
	entries := make([]entry, len(raw))
	for i, r := range raw {
		if entries[i], err = r.entry(data); err != nil {
			return nil, fmt.Errorf("%w: tensor %q: %w", ErrSafetensors, r.name, err)
		}
	}
	return entries, nil
}

type rawEntry struct {
	name    string
	DType   string   `json:"dtype"`
	Shape   []uint64 `json:"shape"`
	Offsets []uint64 `json:"data_offsets"`
}

// parseHeader walks the object by hand, because a map would hide a name that is there twice.
func parseHeader(header []byte) ([]rawEntry, error) {
	dec := json.NewDecoder(bytes.NewReader(header))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, errors.New("must be a JSON object")
	}
	seen := map[string]bool{}
	var entries []rawEntry
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return nil, err
		}
		name, _ := t.(string)
		if seen[name] {
			return nil, fmt.Errorf("%q is there twice", name)
		}
		seen[name] = true
		if name == "__metadata__" {
			if err := dec.Decode(new(map[string]string)); err != nil {
				return nil, fmt.Errorf("%q: %w", name, err)
			}
			continue
		}
		r := rawEntry{name: name}
		if err := dec.Decode(&r); err != nil {
			return nil, fmt.Errorf("%q: %w", name, err)
		}
		if len(r.Offsets) != 2 || r.Offsets[0] > r.Offsets[1] {
			return nil, fmt.Errorf("%q: data_offsets %v, must be [begin, end]", name, r.Offsets)
		}
		entries = append(entries, r)
	}
	if _, err := dec.Token(); err != nil {
		return nil, err
	}
	if rest := bytes.TrimSpace(header[dec.InputOffset():]); len(rest) > 0 {
		return nil, errors.New("bytes follow the JSON object")
	}
	return entries, nil
}

func checkCover(entries []rawEntry, size uint64) error {
	order := slices.Clone(entries)
	slices.SortFunc(order, func(a, b rawEntry) int {
		if c := cmp.Compare(a.Offsets[0], b.Offsets[0]); c != 0 {
			return c
		}
		return cmp.Compare(a.Offsets[1], b.Offsets[1])
	})
	var end uint64
	for _, e := range order {
		if e.Offsets[0] != end {
			return fmt.Errorf("tensor %q begins at %d, the one before it ends at %d", e.name, e.Offsets[0], end)
		}
		end = e.Offsets[1]
	}
	if end != size {
		return fmt.Errorf("tensors end at %d, the data has %d bytes", end, size)
	}
	return nil
}

// elementBits are the types that the format knows. Only some of them can be weights here, but a file may hold others.
var elementBits = map[string]uint64{
	"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
	"I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}

// entry checks the type and shape against the offsets, which checkCover has found to lie inside data.
func (r *rawEntry) entry(data []byte) (entry, error) {
	bits, ok := elementBits[r.DType]
	if !ok {
		return entry{}, fmt.Errorf("unknown dtype %q", r.DType)
	}
	if len(r.Shape) > 16 {
		return entry{}, fmt.Errorf("%d dimensions, at most 16 are allowed", len(r.Shape))
	}
	e := entry{name: r.name, dtype: r.DType, data: data[r.Offsets[0]:r.Offsets[1]:r.Offsets[1]]}
	n := bits / 8
	for _, d := range r.Shape {
		if d != 0 && n > math.MaxInt64/d || d > math.MaxInt64 {
			return entry{}, fmt.Errorf("shape %v is too large", r.Shape)
		}
		n *= d
		e.shape = append(e.shape, int(d))
	}
	if n != uint64(len(e.data)) {
		return entry{}, fmt.Errorf("shape %v of %s needs %d bytes, its offsets give %d", r.Shape, r.DType, n, len(e.data))
	}
	return e, nil
}
