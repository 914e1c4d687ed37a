package token

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
)

// The tokenizers that the tests use. Big ones are parsed once.
var loadQwen = sync.OnceValues(func() (*Tokenizer, error) { return loadDir("../../../shared/models/tokenizers/qwen3") })
var loadMistral = sync.OnceValues(func() (*Tokenizer, error) { return loadDir("../../../shared/models/tokenizers/mistral") })
var loadTiny = sync.OnceValues(func() (*Tokenizer, error) { return loadDir(tinyDir()) })

func loadDir(dir string) (*Tokenizer, error) {
	data, err := os.ReadFile(filepath.Join(dir, "tokenizer.json"))
	if err != nil {
		return nil, err
	}
	return Parse(data)
}

func tinyDir() string {
	const embedded = "../../gpu/model/meridian-tiny"
	if _, err := os.Stat(filepath.Join(embedded, "tokenizer.json")); err == nil {
		return embedded
	}
	return "../../../shared/models/meridian-tiny"
}

// mustLoad skips the test where the folder is absent.
func mustLoad(t testing.TB, load func() (*Tokenizer, error)) *Tokenizer {
	t.Helper()
	tok, err := load()
	if os.IsNotExist(err) {
		t.Skip("the folder of model files is not beside the repository: ", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func readJSON(t testing.TB, path string, into any) {
	t.Helper()
	data, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		t.Skip("the folder of model files is not beside the repository: ", err)
	}
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestMeridianTinyCasesAreExact(t *testing.T) {
	var golden struct {
		Tokenizer []struct {
			Text         string
			IDs          []int32 `json:"ids"`
			IDsNoSpecial []int32 `json:"ids_no_special"`
		}
		Generation []struct {
			GreedyIDs  []int32 `json:"greedy_ids"`
			GreedyText string  `json:"greedy_text"`
		}
	}
	readJSON(t, filepath.Join(tinyDir(), "golden.json"), &golden)
	tok := mustLoad(t, loadTiny)
	for _, c := range golden.Tokenizer {
		if got := tok.Encode(c.Text, true); !slices.Equal(got, c.IDs) {
			t.Errorf("Encode(%q, true) = %v, want %v", c.Text, got, c.IDs)
		}
		if got := tok.Encode(c.Text, false); !slices.Equal(got, c.IDsNoSpecial) {
			t.Errorf("Encode(%q, false) = %v, want %v", c.Text, got, c.IDsNoSpecial)
		}
		if got := tok.Decode(c.IDsNoSpecial, false); got != c.Text {
			t.Errorf("Decode(%v) = %q, want %q", c.IDsNoSpecial, got, c.Text)
		}
	}
	for _, c := range golden.Generation {
		if got := tok.Decode(c.GreedyIDs, true); got != c.GreedyText {
			t.Errorf("Decode(%v) = %q, want %q", c.GreedyIDs, got, c.GreedyText)
		}
	}
}

func TestQwenCases(t *testing.T) {
	checkPort(t, loadQwen, "../../../shared/models/tokenizers/qwen3/golden.json")
}

func TestMistralCases(t *testing.T) {
	checkPort(t, loadMistral, "../../../shared/models/tokenizers/mistral/golden.json")
}

// checkPort compares with ids of the JavaScript port of Hugging Face's library. In none of the cases does the port
// differ from the definition in tokenizer.json.
func checkPort(t *testing.T, load func() (*Tokenizer, error), golden string) {
	var g struct {
		Cases []struct {
			Text    string
			IDs     []int32 `json:"ids"`
			Decoded string
		}
	}
	readJSON(t, golden, &g)
	tok := mustLoad(t, load)
	for _, c := range g.Cases {
		if got := tok.Encode(c.Text, false); !slices.Equal(got, c.IDs) {
			t.Errorf("Encode(%q) = %v, want %v", c.Text, got, c.IDs)
		}
		if got := tok.Decode(c.IDs, false); got != c.Decoded {
			t.Errorf("Decode(%v) = %q, want %q", c.IDs, got, c.Decoded)
		}
	}
}
