package api

import (
	"bytes"
	"fmt"
	"reflect"
	"testing"
)

func rewriterFor(chat bool) *Rewriter {
	return &Rewriter{Chat: chat, Rewrite: Rewrite{ID: []byte(`"cmpl-x"`), Model: []byte(`"m"`), Created: []byte("7"), Index: 2}}
}

// same holds a Rewriter's chunk against RewriteChunk's.
func same(t *testing.T, w *Rewriter, data []byte) {
	t.Helper()
	got := Chunk{Finish: "left over"}
	out, err := w.Chunk(&got, []byte("before "), data)
	want, wantOut, wantErr := RewriteChunk([]byte("before "), data, w.Chat, &w.Rewrite)
	got.out, want.out = 0, 0
	if (err == nil) != (wantErr == nil) {
		t.Fatalf("%q: error %v, want %v", data, err, wantErr)
	}
	if err != nil {
		return
	}
	if !bytes.Equal(out, wantOut) {
		t.Errorf("%q became\n%q, want\n%q", data, out, wantOut)
	}
	if len(got.Text) == 0 && len(want.Text) == 0 {
		got.Text, want.Text = nil, nil
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%q was read as\n%+v, want\n%+v", data, got, want)
	}
}

// streams are chunks as workers send them.
func streams() map[string][]string {
	head := Head{ID: "node", Model: "internal", Created: 3}
	chat := Head{ID: "node", Model: "internal", Created: 3, Chat: true}
	out := map[string][]string{"foreign": {
		`{"id":"a","choices":[{"index":0,"text":"x","finish_reason":null}],"usage":null}`,
		`{"id":"a","choices":[{"index":0,"text":"two words","finish_reason":null}],"usage":null}`,
		`{"id":"a","choices":[{"index":0,"text":"es\"cape","finish_reason":null}],"usage":null}`,
		`{"id":"a","choices":[{"index":0,"text":"y","finish_reason":null}],"usage":{"prompt_tokens":1}}`,
		`{"id":"b","choices":[{"index":0,"text":"y","finish_reason":null}],"usage":null}`,
		`{"id":"b","choices":[{"index":0,"text":"z","finish_reason":null,"other":"text"}],"usage":null}`,
		`{"id":"b","choices":[{"index":0,"text":"q","finish_reason":null,"other":"word"}],"usage":null}`,
		`{"id":"b","choices":[{"index":0,"text":"z","finish_reason":"stop"}],"usage":null}`,
		`{"id":"b","choices":[{"index":0,"token_ids":[1],"text":"ids first"}]}`,
		`{"id":"b","choices":[{"index":0,"token_ids":[2],"text":"ids first"}]}`,
		`{"id":"b","choices":[],"usage":{"prompt_tokens":1}}`,
		`{"error":{"message":"no"}}`,
	}}
	for i := range 4 {
		c := Choice{Text: fmt.Sprint("w", i), TokenIDs: []int32{int32(i), 7}[:1+i%2], Role: i == 0}
		out["completions"] = append(out["completions"], string(head.AppendChunk(nil, c)))
		out["chat"] = append(out["chat"], string(chat.AppendChunk(nil, c)))
	}
	out["ids that are none"] = append(out["completions"][:2:2],
		`{"id":"node","object":"text_completion","created":3,"model":"internal","choices":[{"index":0,"text":"w","logprobs":null,"finish_reason":null,"token_ids":[01]}]}`,
		`{"id":"node","object":"text_completion","created":3,"model":"internal","choices":[{"index":0,"text":"w","logprobs":null,"finish_reason":null,"token_ids":[1,]}]}`,
		`{"id":"node","object":"text_completion","created":3,"model":"internal","choices":[{"index":0,"text":"w","logprobs":null,"finish_reason":null,"token_ids":[]}]}`,
		`{"id":"node","object":"text_completion","created":3,"model":"internal","choices":[{"index":0,"text":"w","logprobs":null,"finish_reason":null,"token_ids":[1]}]`)
	return out
}

func TestRewriterDoesAsRewriteChunk(t *testing.T) {
	for name, chunks := range streams() {
		t.Run(name, func(t *testing.T) {
			w := rewriterFor(name == "chat")
			for _, c := range chunks {
				same(t, w, []byte(c))
			}
		})
	}
}

func TestRewriterRemembersOrdinaryChunks(t *testing.T) {
	for _, name := range []string{"completions", "chat"} {
		w, chunks := rewriterFor(name == "chat"), streams()[name]
		for i, c := range chunks {
			if _, _, ok := w.match([]byte(c)); ok != (i >= 2) && name == "chat" || ok != (i >= 1) && name != "chat" {
				t.Errorf("%s chunk %d: remembered %t", name, i, ok)
			}
			if _, err := w.Chunk(new(Chunk), nil, []byte(c)); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestAChunkThatIsNotUTF8IsRefused(t *testing.T) {
	chunk := func(text string) []byte {
		return []byte(`{"id":"node","object":"text_completion","created":3,"model":"internal","choices":[{"index":0,"text":"` + text + `","logprobs":null,"finish_reason":null}]}`)
	}
	w := rewriterFor(false)
	for i, c := range []struct {
		text string
		ok   bool
	}{{"a\xff", false}, {"é", true}, {"b", true}, {"\xc3", false}, {"c€", true}, {"\xed\xa0\x80", false}} {
		out, err := w.Chunk(new(Chunk), nil, chunk(c.text))
		if (err == nil) != c.ok || c.ok && !bytes.Contains(out, []byte(`"text":"`+c.text+`"`)) {
			t.Errorf("chunk %d, %q: %v %s", i, c.text, err, out)
		}
	}
	if _, _, ok := w.match(chunk("d")); !ok {
		t.Error("the chunks were not remembered: this tries one way only")
	}
}

func FuzzRewriter(f *testing.F) {
	for name, chunks := range streams() {
		for i := range chunks[1:] {
			f.Add([]byte(chunks[i]), []byte(chunks[i+1]), name == "chat")
		}
	}
	f.Fuzz(func(t *testing.T, first, second []byte, chat bool) {
		w := rewriterFor(chat)
		same(t, w, bytes.Clone(first))
		same(t, w, bytes.Clone(second))
	})
}

func BenchmarkRewriter(b *testing.B) {
	data := []byte(streams()["completions"][1])
	b.Run("remembered", func(b *testing.B) {
		w := rewriterFor(false)
		var dst []byte
		var c Chunk
		for b.Loop() {
			dst, _ = w.Chunk(&c, dst[:0], data)
		}
	})
	b.Run("walked", func(b *testing.B) {
		w := rewriterFor(false)
		var dst []byte
		for b.Loop() {
			_, dst, _ = RewriteChunk(dst[:0], data, false, &w.Rewrite)
		}
	})
}
