package model

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"unsafe"
)

// ErrTensor is wrapped by every error that says that a checkpoint's tensors do not fit its config.
var ErrTensor = errors.New("model: tensors do not fit the config")

// Model is a loaded checkpoint. It is read-only and safe for concurrent use until Close.
type Model struct {
	Config Config
	Embed  *Tensor // (vocab, hidden)
	Layers []Layer
	Norm   *Tensor // (hidden)
	Head   *Tensor // (vocab, hidden); Embed when Config.TiedHead
	Hash   string  // 16 hex digits; equal for folders of equal content, on every machine

	TokenizerJSON       []byte // tokenizer.json
	TokenizerConfigJSON []byte // tokenizer_config.json, nil if there is none
	ChatTemplate        []byte // chat_template.jinja, nil if there is none; then the template is in tokenizer_config.json

	unmap []func() error
}

// source is where the files of a checkpoint come from.
type source interface {
	read(name string) ([]byte, error)               // fs.ErrNotExist if there is none
	open(name string) ([]byte, func() error, error) // the bytes stay where they are until the func is called
	where(name string) string                       // for messages
	list(suffix string) (names []string, err error) // names in the folder
}

// Load reads the checkpoint folder dir; "" is the embedded default, meridian-tiny.
func Load(dir string) (*Model, error) {
	if dir == "" {
		return load(embedded{})
	}
	return load(folder(dir))
}

// Close unmaps the weights. Nothing may use the tensors afterwards.
func (m *Model) Close() error {
	var errs []error
	for _, f := range m.unmap {
		errs = append(errs, f())
	}
	m.unmap = nil
	return errors.Join(errs...)
}

func load(src source) (_ *Model, err error) {
	data, err := src.read("config.json")
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", src.where("config.json"), err)
	}
	config, err := ParseConfig(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", src.where("config.json"), err)
	}
	m := &Model{Config: *config, Layers: make([]Layer, config.Layers)}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.Close())
		}
	}()
	if err := m.loadDocuments(src); err != nil {
		return nil, err
	}
	tensors, err := m.openTensors(src)
	if err != nil {
		return nil, err
	}
	if err := m.bind(tensors); err != nil {
		return nil, fmt.Errorf("%s: %w", src.where(""), err)
	}
	m.Hash, err = hashModel(m)
	return m, err
}

func (m *Model) loadDocuments(src source) error {
	for _, d := range []struct {
		name string
		to   *[]byte
		need bool
	}{
		{"tokenizer.json", &m.TokenizerJSON, true},
		{"tokenizer_config.json", &m.TokenizerConfigJSON, false},
		{"chat_template.jinja", &m.ChatTemplate, false},
	} {
		data, err := src.read(d.name)
		if err != nil && (d.need || !errors.Is(err, fs.ErrNotExist)) {
			return fmt.Errorf("read %s: %w", src.where(d.name), err)
		}
		*d.to = data
	}
	data, err := src.read("generation_config.json")
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s: %w", src.where("generation_config.json"), err)
	}
	var g struct {
		EOS tokenIDs `json:"eos_token_id"`
	}
	if err := json.Unmarshal(data, &g); err != nil {
		return fmt.Errorf("%s: %w", src.where("generation_config.json"), err)
	}
	if len(g.EOS) > 0 { // it has the last word, as in transformers
		m.Config.EOS = g.EOS
	}
	if err := checkTokens(&m.Config); err != nil {
		return fmt.Errorf("%s: %w", src.where("generation_config.json"), err)
	}
	return nil
}

// bind puts every tensor in its place, and refuses one that is missing, misshapen or not known: a weight that nobody
// multiplies would give wrong text without a word.
func (m *Model) bind(tensors map[string]entry) error {
	for _, s := range m.slots() {
		e, ok := tensors[s.name]
		if !ok {
			return fmt.Errorf("%w: tensor %q is missing", ErrTensor, s.name)
		}
		delete(tensors, s.name)
		dtype, ok := dtypeOf(e.dtype)
		if !ok {
			return fmt.Errorf("%w: tensor %q has dtype %s; must be BF16, F16 or F32", ErrTensor, s.name, e.dtype)
		}
		if fmt.Sprint(e.shape) != fmt.Sprint(s.shape) {
			return fmt.Errorf("%w: tensor %q has shape %v; config.json asks for %v", ErrTensor, s.name, e.shape, s.shape)
		}
		*s.to = &Tensor{Name: s.name, Type: dtype, Shape: s.shape, Data: aligned(e.data, dtype.Size())}
	}
	if m.Config.TiedHead {
		m.Head = m.Embed
	}
	for name := range tensors {
		if strings.HasSuffix(name, "rotary_emb.inv_freq") || name == "lm_head.weight" {
			continue // old checkpoints store what RoPE computes; a tied head may be stored too
		}
		return fmt.Errorf("%w: tensor %q is not one of %s", ErrTensor, name, m.Config.Architecture)
	}
	return nil
}

// aligned returns data itself, or a copy if it does not start at a multiple of the element size: the format does not
// promise that, and back ends read whole elements.
func aligned(data []byte, size int) []byte {
	if len(data) == 0 || uintptr(unsafe.Pointer(&data[0]))%uintptr(size) == 0 {
		return data
	}
	words := make([]uint64, (len(data)+7)/8)
	out := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), 8*len(words))[:len(data)]
	copy(out, data)
	return out
}

func layerName(i int) string { return fmt.Sprintf("model.layers.%d.", i) }

// folder is a checkpoint on disk.
type folder string

func (f folder) where(name string) string { return filepath.Join(string(f), name) }

func (f folder) read(name string) ([]byte, error) { return os.ReadFile(f.where(name)) }

func (f folder) open(name string) ([]byte, func() error, error) { return mapFile(f.where(name)) }

func (f folder) list(suffix string) ([]string, error) {
	entries, err := os.ReadDir(string(f))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), suffix) {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
