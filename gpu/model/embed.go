package model

import (
	"embed"
	"io/fs"
	"path"
	"strings"
)

// tiny is the default model: 3.4 million parameters, 6.8 MB, so that every binary can serve real text alone.
//
//go:embed meridian-tiny/config.json meridian-tiny/generation_config.json meridian-tiny/model.safetensors
//go:embed meridian-tiny/tokenizer.json meridian-tiny/tokenizer_config.json
var tiny embed.FS

// embedded is the default checkpoint as a source.
type embedded struct{}

func (embedded) where(name string) string { return strings.TrimSuffix("meridian-tiny/"+name, "/") }

func (e embedded) read(name string) ([]byte, error) { return fs.ReadFile(tiny, e.where(name)) }

func (e embedded) open(name string) ([]byte, func() error, error) {
	data, err := e.read(name)
	return data, func() error { return nil }, err
}

func (e embedded) list(suffix string) ([]string, error) {
	names, err := fs.Glob(tiny, e.where("*"+suffix))
	for i := range names {
		names[i] = path.Base(names[i])
	}
	return names, err
}
