package model

import (
	"bytes"
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	oracle "github.com/nlpodyssey/safetensors"
)

// file puts a header in front of n data bytes 0, 1, 2, …
func file(header string, n int) []byte {
	out := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
	for i := range n {
		out = append(out, byte(i))
	}
	return out
}

var safetensorsCases = []struct {
	name    string
	file    []byte
	want    string // part of the error, "" when it is valid
	lenient bool   // the oracle accepts it
}{
	{"one tensor", file(`{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}`, 12), "", true},
	{"two tensors, out of order, and metadata", file(`{"b":{"dtype":"F32","shape":[],"data_offsets":[2,6]},"__metadata__":{"k":"v"},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}`, 6), "", true},
	{"a tensor without elements", file(`{"a":{"dtype":"F32","shape":[0,5],"data_offsets":[0,0]}}`, 0), "", true},
	{"nothing", nil, "needs 8", false},
	{"a header longer than the file", file(`{}`, 0)[:9], "header of 2 bytes", false},
	{"a header of 2^63 bytes", append([]byte{0, 0, 0, 0, 0, 0, 0, 0x80}, '{', '}'), "header of", false},
	{"a header that is no object", file(`[]`, 0), "must be a JSON object", false},
	{"a header that is cut", file(`{"a":{"dtype":"U8"`, 0), "header", false},
	{"bytes behind the object", file(`{}{}`, 0), "follow", false},
	{"a name that is there twice", file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 1), "twice", true},
	{"overlap", file(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}`, 3), "begins at 1", false},
	{"a hole", file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}`, 3), "begins at 2", false},
	{"data that no tensor has", file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}`, 3), "has 3 bytes", false},
	{"offsets beyond the file", file(`{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}`, 3), "has 3 bytes", false},
	{"offsets backwards", file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[3,2]}}`, 3), "data_offsets", false},
	{"negative offsets", file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[-1,2]}}`, 3), "header", false},
	{"one offset", file(`{"a":{"dtype":"U8","shape":[1],"data_offsets":[1]}}`, 3), "data_offsets", false},
	{"a shape whose product overflows to the right size", file(`{"a":{"dtype":"U8","shape":[4294967296,4294967296,3],"data_offsets":[0,0]}}`, 0), "too large", false},
	{"a shape that does not fit the offsets", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}`, 4), "needs 8 bytes", false},
	{"an unknown dtype", file(`{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}`, 1), "unknown dtype", false},
}

func TestParseSafetensors(t *testing.T) {
	for _, tc := range safetensorsCases {
		t.Run(tc.name, func(t *testing.T) {
			entries, err := parseSafetensors(tc.file)
			if tc.want == "" {
				if err != nil {
					t.Fatal(err)
				}
				compareWithOracle(t, tc.file, entries)
				return
			}
			if !errors.Is(err, ErrSafetensors) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
			if _, err := oracle.Deserialize(tc.file); err == nil && !tc.lenient {
				t.Error("the reference reader accepts it")
			}
		})
	}
}

func compareWithOracle(t *testing.T, file []byte, entries []entry) {
	t.Helper()
	want, err := oracle.Deserialize(file)
	if err != nil {
		t.Fatalf("the reference reader refuses it: %v", err)
	}
	if want.Len() != len(entries) {
		t.Fatalf("%d tensors, the reference reader has %d", len(entries), want.Len())
	}
	for _, e := range entries {
		w, ok := want.Tensor(e.name)
		if !ok || w.DType().String() != e.dtype || !bytes.Equal(w.Data(), e.data) || len(w.Shape()) != len(e.shape) {
			t.Errorf("tensor %q differs from the reference reader's", e.name)
		}
	}
}

func TestEmbeddedFileAgreesWithReference(t *testing.T) {
	data, _, err := embedded{}.open("model.safetensors")
	if err != nil {
		t.Fatal(err)
	}
	entries, err := parseSafetensors(data)
	if err != nil {
		t.Fatal(err)
	}
	compareWithOracle(t, data, entries)
}

func FuzzParseSafetensors(f *testing.F) {
	for _, tc := range safetensorsCases {
		f.Add(tc.file)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		entries, err := parseSafetensors(data)
		if err != nil {
			if !errors.Is(err, ErrSafetensors) {
				t.Errorf("undocumented error %v", err)
			}
			return
		}
		again, err := parseSafetensors(safetensorsFile(t, entries))
		if err != nil || len(again) != len(entries) {
			t.Fatalf("a valid file does not survive a round trip: %v", err)
		}
	})
}
