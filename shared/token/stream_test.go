package token

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestStreamHoldsBackHalfCharacters(t *testing.T) {
	tok := spec{
		vocab: "a <0xC3> <0xA9> <0xF0> <0x9F> <0x98> <0x80> é ▁b <s> ▁▁c", added: `[{"id":9,"content":"<s>","special":true}]`,
		top: map[string]string{"decoder": `{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},
			{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}`},
	}.parse(t)
	tests := []struct {
		name   string
		ids    []int32
		pushes string // with bars between, the flush last
		skip   bool
	}{
		{"whole characters pass", []int32{0, 7}, "a|é|", false},
		{"two bytes come together", []int32{1, 2, 0}, "|é|a|", false},
		{"four bytes come together", []int32{3, 4, 5, 6}, "|||😀|", false},
		{"what stays broken comes with the flush", []int32{0, 3, 4}, "a|||\uFFFD", false},
		{"a broken start is one replacement", []int32{3, 4, 0}, "||\uFFFDa|", false},
		{"a lone continuation is one at once", []int32{2, 0}, "\uFFFD|a|", false},
		{"a start after a start breaks the first", []int32{1, 1, 2}, "|\uFFFD|é|", false},
		{"the leading space is dropped once", []int32{8, 8}, "b| b|", false},
		{"of two leading spaces one is dropped", []int32{10, 10}, " c|  c|", false},
		{"a special token before it counts as text", []int32{9, 8}, "<s>| b|", false},
		{"a skipped one does not", []int32{9, 8}, "|b|", true},
		{"unknown ids are nothing", []int32{-1, 0, 99}, "|a||", false},
		{"a skipped token does not break a character", []int32{1, 9, 2}, "||é|", true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := tok.NewStream(tt.skip)
			var got []string
			for _, id := range tt.ids {
				got = append(got, s.Push(id))
			}
			got = append(got, s.Flush())
			if g := strings.Join(got, "|"); g != tt.pushes {
				t.Errorf("gave %q, want %q", g, tt.pushes)
			}
			if d := tok.Decode(tt.ids, tt.skip); d != strings.Join(got, "") {
				t.Errorf("Decode gave %q", d)
			}
		})
	}
}

func TestMetaspaceDecoderDropsTheFirstMarker(t *testing.T) {
	for scheme, want := range map[string]string{"always": "a b", "never": " a b"} {
		tok := spec{vocab: "▁a ▁b", top: map[string]string{
			"decoder": `{"type":"Metaspace","replacement":"▁","prepend_scheme":"` + scheme + `"}`,
		}}.parse(t)
		if got := tok.Decode([]int32{0, 1}, false); got != want {
			t.Errorf("%s gave %q, want %q", scheme, got, want)
		}
	}
}

func TestTokensAreKnownByTextBytesAndID(t *testing.T) {
	tok := spec{vocab: "a Ġb Ã", added: `[{"id":5,"content":"<s> x","special":true}]`, top: map[string]string{"decoder": `{"type":"ByteLevel"}`}}.parse(t)
	tests := []struct {
		id      int32
		piece   string
		bytes   string
		known   bool
		special bool
	}{
		{0, "a", "a", true, false}, {1, "Ġb", " b", true, false}, {2, "Ã", "\xC3", true, false},
		{5, "<s> x", "<s> x", true, true}, {3, "", "", false, false}, {-1, "", "", false, false}, {6, "", "", false, false},
	}
	if tok.VocabSize() != 6 {
		t.Errorf("VocabSize is %d, want 6", tok.VocabSize())
	}
	for _, tt := range tests {
		piece, known := tok.Token(tt.id)
		if piece != tt.piece || known != tt.known || string(tok.TokenBytes(tt.id)) != tt.bytes || tok.IsSpecial(tt.id) != tt.special {
			t.Errorf("id %d is %q, %v, %q, %v", tt.id, piece, known, tok.TokenBytes(tt.id), tok.IsSpecial(tt.id))
		}
		if id, ok := tok.TokenID(tt.piece); tt.known && (id != tt.id || !ok) {
			t.Errorf("TokenID(%q) is %d, %v", tt.piece, id, ok)
		}
	}
	tok.TokenBytes(0)[0] = 'z'
	if string(tok.TokenBytes(0)) != "a" {
		t.Error("TokenBytes gave the tokenizer's own bytes")
	}
}

func TestBrokenUTF8BecomesReplacements(t *testing.T) {
	tests := []struct{ in, want string }{
		{"ok é", "ok é"}, {"a\xffb", "a\uFFFDb"}, {"\xe4\xbdA", "\uFFFDA"}, {"\xe4\xbd", "\uFFFD"},
		{"\xf0\x9f\x98\xf0\x9f\x98\x80", "\uFFFD😀"}, {"\xc0\x80", "\uFFFD\uFFFD"}, {"\xed\xa0\x80", "\uFFFD\uFFFD\uFFFD"},
		{"\xf4\x90\x80\x80", "\uFFFD\uFFFD\uFFFD\uFFFD"}, {"\uFFFD", "\uFFFD"},
	}
	for _, tt := range tests {
		if got := validUTF8(tt.in); got != tt.want {
			t.Errorf("%q became %q, want %q", tt.in, got, tt.want)
		}
	}
}

// FuzzStream checks that Push and Flush give what Decode gives, for any ids, and only whole characters.
func FuzzStream(f *testing.F) {
	tok := mustLoad(f, loadTiny)
	f.Add([]byte("caf\x84\x70\x01\x00"), true)
	f.Add([]byte{0, 132, 0, 112, 1, 252, 0, 229}, false)
	f.Fuzz(func(t *testing.T, data []byte, skip bool) {
		var ids []int32
		var raw []byte
		for i := 0; i+1 < len(data); i += 2 {
			id := int32(data[i])<<8 | int32(data[i+1])
			ids = append(ids, id)
			if !skip || !tok.IsSpecial(id) {
				raw = append(raw, tok.TokenBytes(id)...)
			}
		}
		s := tok.NewStream(skip)
		var out strings.Builder
		for _, id := range ids {
			part := s.Push(id)
			if !utf8.ValidString(part) {
				t.Fatalf("Push gave %q", part)
			}
			out.WriteString(part)
		}
		out.WriteString(s.Flush())
		if got := tok.Decode(ids, skip); got != out.String() {
			t.Fatalf("Decode gave %q, the stream %q", got, out.String())
		}
		if got := validUTF8(string(raw)); got != out.String() {
			t.Fatalf("the bytes are %q, the stream gave %q", got, out.String())
		}
	})
}
