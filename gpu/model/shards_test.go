package model

import (
	"encoding/binary"
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"testing"
)

// shardsOf is a folder whose tensors lie in a.safetensors and b.safetensors.
type shardsOf struct {
	dir       string
	weightMap map[string]string
}

// splitInTwo makes such a folder from a checkpoint of one file.
func splitInTwo(t *testing.T, dir string) shardsOf {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, "model.safetensors"))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := parseSafetensors(data)
	if err != nil {
		t.Fatal(err)
	}
	out := shardsOf{dir: t.TempDir(), weightMap: map[string]string{}}
	for name, part := range map[string][]entry{"a.safetensors": entries[:5], "b.safetensors": entries[5:]} {
		for _, e := range part {
			out.weightMap[e.name] = name
		}
		if err := os.WriteFile(filepath.Join(out.dir, name), safetensorsFile(t, part), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"config.json", "tokenizer.json", "tokenizer_config.json"} {
		doc, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(out.dir, name), doc, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return out
}

func (s shardsOf) writeIndex(t *testing.T, change func(map[string]string)) {
	t.Helper()
	w := maps.Clone(s.weightMap)
	change(w)
	data, err := json.Marshal(map[string]any{"weight_map": w})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(s.dir, indexName), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// safetensorsFile writes entries one after the other.
func safetensorsFile(t testing.TB, entries []entry) []byte {
	t.Helper()
	header := map[string]any{}
	var data []byte
	for _, e := range entries {
		header[e.name] = map[string]any{"dtype": e.dtype, "shape": e.shape, "data_offsets": []int{len(data), len(data) + len(e.data)}}
		data = append(data, e.data...)
	}
	h, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(h))), h...), data...)
}
