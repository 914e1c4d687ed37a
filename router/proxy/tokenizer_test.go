package proxy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"meridian.internal/router/pool"
	"meridian.internal/router/upstream"
	"meridian.internal/shared/api"
	"meridian.internal/shared/node"
)

// smallTokenizer knows the letters a, b and c and the pair ab.
const smallTokenizer = `{"version":"1.0","added_tokens":[],"normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"use_regex":true},
	"post_processor":null,"decoder":{"type":"ByteLevel"},"model":{"type":"BPE","vocab":{"a":0,"b":1,"c":2,"ab":3},"merges":["a b"]}}`

func TestBuildTokenizer(t *testing.T) {
	file := "c{{ messages[0].content }}"
	f := TokenizerFile{Hash: "h", ContextLen: 9, Vocab: 4, Tokenizer: []byte(smallTokenizer), Config: []byte(`{"chat_template":"{{ messages[0].content }}"}`)}
	tok, err := BuildTokenizer(f)
	if err != nil {
		t.Fatal(err)
	}
	if got := tok.Encode("abc"); !slices.Equal(got, []int32{3, 2}) {
		t.Errorf("got %v", got)
	}
	r := &api.Request{Chat: true, Messages: []byte(`[{"role":"user","content":"ab"}]`)}
	if ids, e := tok.chat(t.Context(), r); e != nil || !slices.Equal(ids, []int32{3}) {
		t.Errorf("got %v, %v", ids, e)
	}
	f.ChatTemplate = &file
	tok, _ = BuildTokenizer(f)
	if ids, e := tok.chat(t.Context(), r); e != nil || !slices.Equal(ids, []int32{2, 3}) {
		t.Errorf("a file of its own: got %v, %v", ids, e)
	}
	many := &api.Request{Chat: true, Turns: 10, Messages: []byte(`[]`)}
	if _, e := tok.chat(t.Context(), many); e == nil || !strings.Contains(e.Message, "10 messages") {
		t.Errorf("more messages than the context has tokens: %v", e)
	}
	f.ChatTemplate, f.Config = nil, []byte("null")
	tok, _ = BuildTokenizer(f)
	if ids, e := tok.chat(t.Context(), r); e != nil || ids != nil {
		t.Errorf("no template: got %v, %v", ids, e)
	}
	file = `{{ raise_exception("no") }}`
	f.ChatTemplate = &file
	tok, _ = BuildTokenizer(f)
	if _, e := tok.chat(t.Context(), r); e == nil || e.Status() != 400 || e.Param != "messages" {
		t.Errorf("a template that refuses: got %v", e)
	}
	f.Tokenizer = []byte(`{}`)
	if _, err := BuildTokenizer(f); err == nil {
		t.Error("no tokenizer: accepted")
	}
}

func TestTokenizersAreFetchedOnce(t *testing.T) {
	var asked atomic.Int64
	var broken atomic.Bool
	broken.Store(true)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		if broken.Load() {
			w.WriteHeader(500)
			return
		}
		fmt.Fprintf(w, `{"hash":"h","context_len":9,"tokenizer":%s,"tokenizer_config":null}`, smallTokenizer)
	}))
	defer s.Close()
	p, err := pool.New(pool.Options{Now: func() int64 { return 1 }})
	if err != nil {
		t.Fatal(err)
	}
	client := upstream.New(upstream.Options{})
	defer client.Close()
	ts := &Tokenizers{Pool: p, Client: client, Build: BuildTokenizer}
	if tok, err := ts.For(t.Context(), "m"); tok != nil || err != nil {
		t.Errorf("no node: got %v, %v", tok, err)
	}
	p.Put(node.Info{Name: "g", Role: node.RoleGen, URL: s.URL, State: node.Ready, Seq: 1, Model: &node.Model{Name: "m", Hash: "h"}})
	gone, leave := context.WithCancel(t.Context())
	leave()
	if _, err := ts.For(gone, "m"); !errors.Is(err, context.Canceled) {
		t.Errorf("a client that has left: got %v", err)
	}
	for range 3 { // a failure is remembered for a moment, but not that a client left
		if _, err := ts.For(t.Context(), "m"); err == nil || !strings.Contains(err.Error(), "status 500") {
			t.Errorf("got %v", err)
		}
	}
	if asked.Load() != 1 {
		t.Errorf("asked %d times while it fails", asked.Load())
	}
	broken.Store(false)
	ts.byHash["h"].failed = ts.byHash["h"].failed.Add(-2 * tokenizerRetry)
	for range 3 {
		if tok, err := ts.For(t.Context(), "m"); err != nil || tok.ContextLen != 9 {
			t.Errorf("got %v, %v", tok, err)
		}
	}
	if asked.Load() != 2 {
		t.Errorf("asked %d times", asked.Load())
	}
	p.Put(node.Info{Name: "g", Role: node.RoleGen, URL: s.URL, State: node.Ready, Seq: 2, Model: &node.Model{Name: "m", Hash: "other"}})
	if _, err := ts.For(t.Context(), "m"); err == nil || !strings.Contains(err.Error(), `hash "h"`) {
		t.Errorf("another hash: got %v", err)
	}
}
