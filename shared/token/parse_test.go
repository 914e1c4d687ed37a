package token

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

// spec is a tokenizer.json in the making: the defaults make a SentencePiece-like one without merges.
type spec struct {
	vocab  string // pieces with spaces between them; the place is the id
	merges []string
	added  string // JSON
	model  string // further fields of the model, JSON without braces
	top    map[string]string
}

func (s spec) json() []byte {
	vocab := map[string]int{}
	for i, piece := range strings.Fields(s.vocab) {
		vocab[piece] = i
	}
	v, _ := json.Marshal(vocab)
	m, _ := json.Marshal(s.merges)
	top := map[string]string{"decoder": `{"type":"Sequence","decoders":[{"type":"Fuse"}]}`, "added_tokens": "[]"}
	maps.Copy(top, s.top)
	if s.added != "" {
		top["added_tokens"] = s.added
	}
	model := fmt.Sprintf(`{"type":"BPE","vocab":%s,"merges":%s`, v, m)
	if s.model != "" {
		model += "," + s.model
	}
	top["model"] = model + "}"
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(top)) {
		parts = append(parts, fmt.Sprintf("%q:%s", k, top[k]))
	}
	return []byte("{" + strings.Join(parts, ",") + "}")
}

func (s spec) parse(t testing.TB) *Tokenizer {
	t.Helper()
	tok, err := Parse(s.json())
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

// pieces encodes a text and spells the tokens, with bars between them.
func pieces(tok *Tokenizer, text string) string {
	var out []string
	for _, id := range tok.Encode(text, true) {
		p, _ := tok.Token(id)
		out = append(out, p)
	}
	return strings.Join(out, "|")
}

func pre(s string) map[string]string { return map[string]string{"pre_tokenizer": s} }

func TestEncodeFollowsTheFile(t *testing.T) {
	const abc = "a b c ab abc bc ▁ ▁a . 1 2 12 Ġ Ġa <unk>"
	merges := []string{"a b", "ab c", "b c", "▁ a", "1 2", "Ġ a"}
	tests := []struct {
		name string
		spec spec
		text string
		want string
	}{
		{"the first merge of the list wins", spec{vocab: abc, merges: []string{"b c", "a b"}}, "abc", "a|bc"},
		{"merges go on with what they made", spec{vocab: abc, merges: merges}, "abc", "abc"},
		{"the leftmost of equal pairs is joined first", spec{vocab: "a aa", merges: []string{"a a"}}, "aaa", "aa|a"},
		{"of a pair that comes twice the later place counts", spec{vocab: abc, merges: []string{"a b", "b c", "a b"}}, "abc", "a|bc"},
		{"a character without token is dropped", spec{vocab: abc}, "axb", "a|b"},
		{"a character without token is the unknown token", spec{vocab: abc, model: `"unk_token":"<unk>"`}, "axxb", "a|<unk>|<unk>|b"},
		{"unknown tokens are fused", spec{vocab: abc, model: `"unk_token":"<unk>","fuse_unk":true`}, "axxbx", "a|<unk>|b|<unk>"},
		{"an unknown character falls back to bytes", spec{vocab: "a <0xC3> <0xA9>", model: `"byte_fallback":true`}, "aé", "a|<0xC3>|<0xA9>"},
		{"without all bytes it is unknown", spec{vocab: "a <0xC3> <unk>", model: `"byte_fallback":true,"unk_token":"<unk>"`}, "aé", "a|<unk>"},
		{"ignore_merges takes a whole piece that is a token", spec{vocab: abc, model: `"ignore_merges":true`}, "abc", "abc"},
		{"without it the merges decide", spec{vocab: abc}, "abc", "a|b|c"},
		{"Metaspace puts a marker before the text", spec{vocab: abc, merges: merges, top: pre(`{"type":"Metaspace","replacement":"▁","prepend_scheme":"always"}`)}, "a b", "▁a|▁|b"},
		{"Metaspace never puts one before it", spec{vocab: abc, merges: merges, top: pre(`{"type":"Metaspace","replacement":"▁","prepend_scheme":"never"}`)}, "a a", "a|▁a"},
		{"Metaspace with first marks the first piece only", spec{vocab: abc + " <s>", merges: merges, added: `[{"id":15,"content":"<s>"}]`, top: pre(`{"type":"Metaspace","replacement":"▁","prepend_scheme":"first"}`)}, "a<s>a", "▁a|<s>|a"},
		{"Metaspace with always marks each", spec{vocab: abc + " <s>", merges: merges, added: `[{"id":15,"content":"<s>"}]`, top: pre(`{"type":"Metaspace","replacement":"▁"}`)}, "a<s>a", "▁a|<s>|▁a"},
		{"Metaspace does not double a marker", spec{vocab: abc, merges: merges, top: pre(`{"type":"Metaspace","replacement":"▁"}`)}, " a", "▁a"},
		{"ByteLevel adds a space where asked", spec{vocab: abc, merges: merges, top: pre(`{"type":"ByteLevel","add_prefix_space":true}`)}, "a", "Ġa"},
		{"Digits one by one", spec{vocab: abc, merges: merges, top: pre(`{"type":"Digits","individual_digits":true}`)}, "a12", "a|1|2"},
		{"Digits together", spec{vocab: abc, merges: merges, top: pre(`{"type":"Digits"}`)}, "a12", "a|12"},
		{"Split keeps the separator", spec{vocab: abc, merges: merges, top: pre(`{"type":"Split","pattern":{"String":"."},"behavior":"Isolated"}`)}, "a.bc", "a|.|bc"},
		{"Split removes it", spec{vocab: abc, merges: merges, top: pre(`{"type":"Split","pattern":{"String":"."},"behavior":"Removed"}`)}, "a.bc", "a|bc"},
		{"Split keeps the matches only", spec{vocab: abc, merges: merges, top: pre(`{"type":"Split","pattern":{"Regex":"\\p{L}+"},"behavior":"Removed","invert":true}`)}, "ab.1.c", "ab|c"},
		{"normalizers in order", spec{vocab: abc, merges: merges, top: map[string]string{"normalizer": `{"type":"Sequence","normalizers":[{"type":"Strip","strip_left":true,"strip_right":true},{"type":"Prepend","prepend":"▁"},{"type":"Replace","pattern":{"String":"x"},"content":"b"}]}`}}, "  ax ", "▁|ab"},
		{"nothing is put before an empty text", spec{vocab: abc, top: map[string]string{"normalizer": `{"type":"Prepend","prepend":"▁"}`}}, "", ""},
		{"NFKC", spec{vocab: abc, merges: merges, top: map[string]string{"normalizer": `{"type":"NFKC"}`}}, "①", "1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := pieces(tt.spec.parse(t), tt.text); got != tt.want {
				t.Errorf("%q gave %s, want %s", tt.text, got, tt.want)
			}
		})
	}
}

func TestAddedTokens(t *testing.T) {
	tests := []struct{ name, added, text, want string }{
		{"are found before the model runs", `{"id":9,"content":"<x>"}`, "a<x>b", "a|<x>|b"},
		{"the longest at a place wins", `{"id":9,"content":"<x>"},{"id":10,"content":"<x><x>"}`, "<x><x><x>", "<x><x>|<x>"},
		{"lstrip takes the space before", `{"id":9,"content":"<x>","lstrip":true}`, "a  <x> b", "a|<x>|_|b"},
		{"rstrip takes the space after", `{"id":9,"content":"<x>","rstrip":true}`, "a <x>  b", "a|_|<x>|b"},
		{"single_word needs a border", `{"id":9,"content":"ab","single_word":true}`, "ab abc cab .ab.", "ab|_|a|b|c|_|c|a|b|_|.|ab|."},
		{"a normalized one is found in the normalized text", `{"id":9,"content":"Q","normalized":true}`, "axb", "a|Q|b"},
		{"an unnormalized one in the text as it came", `{"id":9,"content":"x"}`, "axb", "a|x|b"},
		{"an empty one is ignored", `{"id":9,"content":""}`, "ab", "a|b"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := spec{vocab: "a b c . _", added: "[" + tt.added + "]", top: map[string]string{"normalizer": `{"type":"Sequence","normalizers":[
				{"type":"Replace","pattern":{"String":" "},"content":"_"},{"type":"Replace","pattern":{"String":"x"},"content":"Q"}]}`}}
			if got := strings.ReplaceAll(pieces(s.parse(t), tt.text), "__", "_"); got != tt.want {
				t.Errorf("%q gave %s, want %s", tt.text, got, tt.want)
			}
		})
	}
}

func TestPostProcessor(t *testing.T) {
	template := func(single string) string {
		return `{"type":"TemplateProcessing","single":[` + single + `],"special_tokens":{"<s>":{"id":"<s>","ids":[1]},"</s>":{"id":"</s>","ids":[2]}}}`
	}
	bos, text, eos := `{"SpecialToken":{"id":"<s>"}}`, `{"Sequence":{"id":"A"}}`, `{"SpecialToken":{"id":"</s>"}}`
	tests := []struct{ name, post, want string }{
		{"none", `null`, "a"},
		{"at the start", template(bos + "," + text), "<s>|a"},
		{"at both ends", template(bos + "," + text + "," + eos), "<s>|a|</s>"},
		{"in a sequence", `{"type":"Sequence","processors":[{"type":"ByteLevel"},` + template(bos+","+text) + `]}`, "<s>|a"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tok := spec{vocab: "a <s> </s>", top: map[string]string{"post_processor": tt.post}}.parse(t)
			if got := pieces(tok, "a"); got != tt.want {
				t.Errorf("gave %s, want %s", got, tt.want)
			}
			if got := tok.Encode("a", false); !slices.Equal(got, []int32{0}) {
				t.Errorf("without special tokens gave %v", got)
			}
		})
	}
}

// TestWhatIsNotSupportedIsRefused: the message names the field and the value.
func TestWhatIsNotSupportedIsRefused(t *testing.T) {
	top := func(k, v string) spec { return spec{vocab: "a b", top: map[string]string{k: v}} }
	tests := []struct {
		name string
		spec spec
		want []string
	}{
		{"another model", spec{vocab: "a", model: `"type":"WordPiece"`}, []string{"model.type", "WordPiece", "BPE"}},
		{"dropout", spec{vocab: "a", model: `"dropout":0.5`}, []string{"model.dropout", "0.5"}},
		{"a prefix of continued words", spec{vocab: "a", model: `"continuing_subword_prefix":"##"`}, []string{"continuing_subword_prefix", "##"}},
		{"a suffix of words", spec{vocab: "a", model: `"end_of_word_suffix":"</w>"`}, []string{"end_of_word_suffix", "</w>"}},
		{"an unknown token that is none", spec{vocab: "a", model: `"unk_token":"<u>"`}, []string{"model.unk_token", "<u>"}},
		{"no vocabulary", spec{}, []string{"model.vocab"}},
		{"a merge of no token", spec{vocab: "a", merges: []string{"a x"}}, []string{"model.merges[0]", `"x"`}},
		{"a merge into no token", spec{vocab: "a b", merges: []string{"a b"}}, []string{"model.merges[0]", `"ab"`}},
		{"a merge of three", spec{vocab: "a b", merges: []string{"a b c"}}, []string{"model.merges", "a b c"}},
		{"a normalizer", top("normalizer", `{"type":"Precompiled"}`), []string{"normalizer.type", "Precompiled"}},
		{"a normalizer in a sequence", top("normalizer", `{"type":"Sequence","normalizers":[{"type":"Nmt"}]}`), []string{"normalizer.normalizers[0].type", "Nmt"}},
		{"a replacement by pattern", top("normalizer", `{"type":"Replace","pattern":{"Regex":"x"}}`), []string{"normalizer.pattern"}},
		{"a pre-tokenizer", top("pre_tokenizer", `{"type":"BertPreTokenizer"}`), []string{"pre_tokenizer.type", "BertPreTokenizer"}},
		{"a split pattern", top("pre_tokenizer", `{"type":"Split","pattern":{"Regex":"\\w+"},"behavior":"Isolated"}`), []string{"pre_tokenizer.pattern", `\\w+`}},
		{"a split behaviour", top("pre_tokenizer", `{"type":"Split","pattern":{"String":" "},"behavior":"MergedWithNext"}`), []string{"pre_tokenizer.behavior", "MergedWithNext"}},
		{"a stage after ByteLevel", top("pre_tokenizer", `{"type":"Sequence","pretokenizers":[{"type":"ByteLevel"},{"type":"Digits"}]}`), []string{"pre_tokenizer.pretokenizers[1].type", "Digits"}},
		{"a prepend scheme", top("pre_tokenizer", `{"type":"Metaspace","replacement":"_","prepend_scheme":"last"}`), []string{"prepend_scheme", "last"}},
		{"a decoder", top("decoder", `{"type":"WordPiece"}`), []string{"decoder.type", "WordPiece"}},
		{"no decoder", top("decoder", `null`), []string{"decoder"}},
		{"a decoder that strips the end", top("decoder", `{"type":"Sequence","decoders":[{"type":"Fuse"},{"type":"Strip","content":" ","start":0,"stop":1}]}`), []string{"decoder.decoders[1]", "Strip"}},
		{"a post-processor", top("post_processor", `{"type":"BertProcessing"}`), []string{"post_processor.type", "BertProcessing"}},
		{"a template without text", top("post_processor", `{"type":"TemplateProcessing","single":[]}`), []string{"post_processor.single", "0 times"}},
		{"a template with an unknown token", top("post_processor", `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<q>"}}]}`), []string{"post_processor.single[0]", "<q>"}},
		{"a template with an id outside the vocabulary", top("post_processor", `{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"q"}}],"special_tokens":{"q":{"ids":[77]}}}`), []string{"post_processor.special_tokens", "77"}},
		{"an id that is too high", spec{vocab: "a", added: `[{"id":2000000000,"content":"x"}]`}, []string{"added_tokens[0]", "2000000000"}},
		{"an id below zero", spec{vocab: "a", added: `[{"id":-1,"content":"x"}]`}, []string{"added_tokens[0]", "-1"}},
		{"an id that two tokens have", spec{vocab: "a", added: `[{"id":0,"content":"x"}]`}, []string{"added_tokens[0]", `"a"`, `"x"`}},
		{"a token with two ids", spec{vocab: "a b", added: `[{"id":1,"content":"a"}]`}, []string{"added_tokens[0]", `"a"`}},
		{"sequences without end", top("normalizer", strings.Repeat(`{"type":"Sequence","normalizers":[`, 20)+strings.Repeat("]}", 20)), []string{"normalizer", "deep"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse(tt.spec.json())
			if err == nil {
				t.Fatal("was accepted")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not contain %q", err, want)
				}
			}
		})
	}
}

func TestAMergeMayBeAPair(t *testing.T) {
	data := strings.Replace(string(spec{vocab: "a b ab", merges: []string{"a b"}}.json()), `"a b"`, `["a","b"]`, 1)
	tok, err := Parse([]byte(data))
	if err != nil || pieces(tok, "ab") != "ab" {
		t.Fatalf("gave %v", err)
	}
}

// FuzzParse parses any file; what is accepted encodes and decodes without panic.
func FuzzParse(f *testing.F) {
	f.Add(spec{vocab: "a b ab <unk>", merges: []string{"a b"}, model: `"unk_token":"<unk>"`, added: `[{"id":9,"content":"<x>","special":true}]`}.json())
	f.Add(spec{vocab: "Ġ a", top: pre(`{"type":"ByteLevel"}`)}.json())
	f.Add(spec{vocab: "▁ a", top: pre(`{"type":"Metaspace","replacement":"▁"}`)}.json())
	f.Add(spec{vocab: "a", top: map[string]string{"decoder": `{"type":"Metaspace","replacement":"▁"}`}}.json())
	f.Fuzz(func(t *testing.T, data []byte) {
		tok, err := Parse(data)
		if err != nil {
			return
		}
		if tok.VocabSize() > 4*len(data)+maxGap {
			t.Fatalf("a file of %d bytes gave %d ids", len(data), tok.VocabSize())
		}
		ids := tok.Encode("aé <x>\xff12", true)
		for _, id := range ids {
			if _, ok := tok.Token(id); !ok {
				t.Fatalf("id %d has no token", id)
			}
		}
		tok.Decode(append(ids, -1, 1<<30), false)
	})
}

// What a hostile file makes of a text is bounded: replacements that double it, one after the other, are refused.
func TestReplacementsMayNotGrowATextWithoutBound(t *testing.T) {
	doubled := func(n int) string {
		return strings.TrimSuffix(strings.Repeat(`{"type":"Replace","pattern":{"String":"a"},"content":"aa"},`, n), ",")
	}
	for n, good := range map[int]bool{10: true, 11: false, 26: false} {
		for name, file := range map[string]string{
			"normalizer": `{"normalizer":{"type":"Sequence","normalizers":[` + doubled(n) + `]},"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"b":0},"merges":[]}}`,
			"decoder":    `{"decoder":{"type":"Sequence","decoders":[` + doubled(n) + `,{"type":"ByteFallback"},{"type":"Fuse"}]},"model":{"type":"BPE","byte_fallback":true,"vocab":{"a":0},"merges":[]}}`,
		} {
			_, err := Parse([]byte(file))
			if grows := err != nil && strings.Contains(err.Error(), "grow by more than 1024 times"); grows == good {
				t.Errorf("%s of %d: %v", name, n, err)
			}
		}
	}
}
