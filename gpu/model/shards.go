package model

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
)

const indexName = "model.safetensors.index.json"

// openTensors maps the files of the checkpoint and reads their headers. With an index, exactly the files that it names
// belong to the checkpoint, and each tensor must be in the file that it names.
func (m *Model) openTensors(src source) (map[string]entry, error) {
	index, files, err := shards(src)
	if err != nil {
		return nil, err
	}
	tensors := map[string]entry{}
	for _, name := range files {
		data, unmap, err := src.open(name)
		if err != nil {
			return nil, fmt.Errorf("open %s: %w", src.where(name), err)
		}
		m.unmap = append(m.unmap, unmap)
		entries, err := parseSafetensors(data)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", src.where(name), err)
		}
		for _, e := range entries {
			if _, twice := tensors[e.name]; twice {
				return nil, fmt.Errorf("%s: %w: tensor %q is in another file too", src.where(name), ErrTensor, e.name)
			}
			if want, ok := index[e.name]; index != nil && (!ok || want != name) {
				return nil, fmt.Errorf("%s: %w: tensor %q is here; %s says %q", src.where(name), ErrTensor, e.name, indexName, want)
			}
			tensors[e.name] = e
		}
	}
	for name, file := range index {
		if _, ok := tensors[name]; !ok {
			return nil, fmt.Errorf("%s: %w: tensor %q is not in %s", src.where(indexName), ErrTensor, name, file)
		}
	}
	return tensors, nil
}

// shards gives the files to read and, if there is one, the index: tensor name to file name.
func shards(src source) (index map[string]string, files []string, err error) {
	data, err := src.read(indexName)
	if err == nil {
		return parseIndex(data, src)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("read %s: %w", src.where(indexName), err)
	}
	files, err = src.list(".safetensors")
	if err != nil {
		return nil, nil, fmt.Errorf("list %s: %w", src.where(""), err)
	}
	if slices.Contains(files, "model.safetensors") {
		return nil, []string{"model.safetensors"}, nil
	}
	if len(files) != 1 {
		return nil, nil, fmt.Errorf("%s: %w: %d .safetensors files; must be model.safetensors, one other, or many with %s",
			src.where(""), ErrTensor, len(files), indexName)
	}
	return nil, files, nil
}

func parseIndex(data []byte, src source) (map[string]string, []string, error) {
	var idx struct {
		WeightMap map[string]string `json:"weight_map"`
	}
	if err := json.Unmarshal(data, &idx); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", src.where(indexName), err)
	}
	if len(idx.WeightMap) == 0 {
		return nil, nil, fmt.Errorf("%s: %w: weight_map is empty", src.where(indexName), ErrTensor)
	}
	files := slices.Compact(slices.Sorted(maps.Values(idx.WeightMap)))
	for _, f := range files {
		if f == "" || f == "." || f == ".." || filepath.Base(f) != f { // an index must not lead out of its folder
			return nil, nil, fmt.Errorf("%s: %w: file name %q; must be a plain name", src.where(indexName), ErrTensor, f)
		}
	}
	return idx.WeightMap, files, nil
}
