package token

import (
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// joinSlowly merges by the definition: look for the best pair, join it, start again.
func joinSlowly(t *pairTable, ids []int32) []int32 {
	for {
		best, at := noMerge, 0
		for i := 0; i+1 < len(ids); i++ {
			if v := t.get(ids[i], ids[i+1]); v < best {
				best, at = v, i
			}
		}
		if best == noMerge {
			return ids
		}
		ids = slices.Concat(ids[:at], []int32{int32(uint32(best))}, ids[at+2:])
	}
}

func TestBothWaysOfMergingAgreeWithTheDefinition(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		table := newPairTable(64)
		for rank := range 60 { // ids 0..9 are symbols; merges may make any id, also out of order
			table.put(rng.Int32N(30), rng.Int32N(30), merge(rank, 10+rng.Int32N(20)))
		}
		ids := make([]int32, 2+rng.IntN(200))
		for i := range ids {
			ids[i] = rng.Int32N(10)
		}
		want := joinSlowly(&table, ids)
		if got := table.joinLong(slices.Clone(ids)); !slices.Equal(got, want) {
			t.Fatalf("the heap made %v of %v, want %v", got, ids, want)
		}
		short := ids[:min(len(ids), shortPiece)]
		if got, want := table.joinShort(slices.Clone(short)), joinSlowly(&table, short); !slices.Equal(got, want) {
			t.Fatalf("the scan made %v of %v, want %v", got, short, want)
		}
	}
}

func TestWordsOneByOneGiveTheIDsOfTheWholeText(t *testing.T) {
	tok := mustLoad(t, loadMistral)
	if !tok.model.words {
		t.Fatal("the words of Mistral's vocabulary are not independent")
	}
	rng := rand.New(rand.NewPCG(3, 4))
	alphabet := []string{"▁", "▁", "▁▁", "a", "the", "ing", "é", "字", "😀", "\n", ".", "1"}
	for range 2000 {
		var b strings.Builder
		for range 1 + rng.IntN(30) {
			b.WriteString(alphabet[rng.IntN(len(alphabet))])
		}
		if got, want := tok.model.encode(nil, b.String()), tok.model.tokenize(b.String()); !slices.Equal(got, want) {
			t.Fatalf("%q gave %v, want %v", b.String(), got, want)
		}
	}
}

func TestAMergeOverTheStartOfAWordKeepsTheTextWhole(t *testing.T) {
	tok := spec{vocab: "a ▁ b a▁", merges: []string{"a ▁"}, top: pre(`{"type":"Metaspace","replacement":"▁","prepend_scheme":"never","split":false}`)}.parse(t)
	if got := pieces(tok, "a b"); got != "a▁|b" {
		t.Fatalf("gave %s", got)
	}
}

// TestLongTextsOfAnyKindEncode would not end in time if anything were quadratic.
func TestLongTextsOfAnyKindEncode(t *testing.T) {
	for name, load := range map[string]func() (*Tokenizer, error){"tiny": loadTiny, "qwen3": loadQwen, "mistral": loadMistral} {
		t.Run(name, func(t *testing.T) {
			tok := mustLoad(t, load)
			for _, unit := range []string{"a", " ", " \n", "é", "ab", "<|", "\xff", "\u0301"} {
				text := strings.Repeat(unit, 1<<20/len(unit))
				begin := time.Now()
				ids := tok.Encode(text, false)
				t.Logf("1 MB of %q: %d ids in %v", unit, len(ids), time.Since(begin).Round(time.Millisecond))
				// x/text breaks up runs of combining marks, and ' ' is what the decoder strips.
				if got := tok.Decode(ids, false); unit != "\u0301" && strings.TrimSpace(got) != strings.TrimSpace(validUTF8(text)) {
					t.Errorf("%q does not come back", unit)
				}
			}
		})
	}
}

func TestOneTokenizerServesManyGoroutines(t *testing.T) {
	tok := mustLoad(t, loadTiny)
	text := strings.Repeat("Once upon a time, there was a little girl named Lily. ", 50)
	want := tok.Encode(text, true)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			for range 50 {
				tok.Encode(string(rune('a'+rng.IntN(26)))+text[rng.IntN(500):], false) // fills the cache
				if got := tok.Encode(text, true); !slices.Equal(got, want) {
					t.Error("the ids differ")
					return
				}
			}
		})
	}
	wg.Wait()
}

func TestTheCacheIsBounded(t *testing.T) {
	c := newCache()
	for i := range 3 * shards * shardPieces {
		c.put(strings.Repeat("x", i%7)+string(rune(0x4E00+i%20000))+string(rune('a'+i%26)), []int32{int32(i)})
	}
	for i := range c.shards {
		if n := len(c.shards[i].ids); n > shardPieces {
			t.Fatalf("shard %d holds %d pieces", i, n)
		}
	}
}

// FuzzEncode checks that a byte-level tokenizer gives back any text, the same ids each time, and that special tokens in
// the text are the only way to special ids.
func FuzzEncode(f *testing.F) {
	tok := mustLoad(f, loadTiny)
	for _, s := range []string{"Hello, world!", "naïve café — 你好 🙂", "<|user|>hi<|assistant|>", "a\xffb", "  \n\n x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ids := tok.Encode(text, false)
		if got := tok.Decode(ids, false); got != validUTF8(text) {
			t.Fatalf("%q became %q", text, got)
		}
		if again := tok.Encode(text, true); !slices.Equal(again[1:], ids) || again[0] != 0 {
			t.Fatalf("%q gave %v and then %v", text, ids, again)
		}
		for _, id := range ids {
			piece, ok := tok.Token(id)
			if !ok || tok.IsSpecial(id) && !strings.Contains(text, piece) {
				t.Fatalf("%q gave id %d", text, id)
			}
		}
	})
}

func BenchmarkEncode(b *testing.B) {
	english := strings.Repeat("Once upon a time, there was a little girl named Lily. She loved to play outside in the park, didn't she? ", 200)
	code, err := os.ReadFile("merge.go")
	if err != nil {
		b.Fatal(err)
	}
	for _, text := range []struct{ name, text string }{{"english", english}, {"code", string(code)}, {"chinese", strings.Repeat("从前有一个小女孩,她喜欢在公园里玩。", 300)}} {
		for _, m := range []struct {
			name string
			load func() (*Tokenizer, error)
		}{{"tiny", loadTiny}, {"qwen3", loadQwen}, {"mistral", loadMistral}} {
			b.Run(m.name+"/"+text.name, func(b *testing.B) {
				tok := mustLoad(b, m.load)
				b.SetBytes(int64(len(text.text)))
				for b.Loop() {
					tok.Encode(text.text, true)
				}
			})
		}
	}
}

func BenchmarkStream(b *testing.B) {
	tok := mustLoad(b, loadTiny)
	ids := tok.Encode("Once upon a time, there was a little girl named Lily.", false)
	for b.Loop() {
		s := tok.NewStream(true)
		for _, id := range ids {
			s.Push(id)
		}
		s.Flush()
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(ids)), "ns/token")
}
