package kvdisk

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"meridian.internal/gpu/kv"
	"meridian.internal/shared/blockhash"
)

const (
	tokens = 4
	block  = 96
)

func options(dir string) Options {
	return Options{Dir: dir, Slots: 10, Identity: "model a", Tokens: tokens, Block: block}
}

// open opens the folder until the end of the test.
func open(t *testing.T, o Options) (*Files, []kv.Kept, string) {
	t.Helper()
	f, kept, discarded, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Close)
	return f, kept, discarded
}

func kept(slot int32) kv.Kept {
	n := uint64(slot)
	return kv.Kept{Slot: slot, ParentHash: blockhash.Hash(100 + n), Hash: blockhash.Hash(200 + n), ParentSerial: 300 + n, Serial: 400 + n, Tokens: []int32{slot, 2, 3, -1}}
}

func content(slot int32) []byte { return bytes.Repeat([]byte{byte(slot + 1)}, block) }

// written makes a folder with blocks in some slots.
func written(t *testing.T, slots ...int32) string {
	t.Helper()
	dir := t.TempDir()
	f, _, _ := open(t, options(dir))
	for _, s := range slots {
		if err := f.Write(kept(s), content(s)); err != nil {
			t.Fatal(err)
		}
	}
	f.Close()
	return dir
}

func TestBlocksOutliveTheProcess(t *testing.T) {
	dir := written(t, 0, 7, 9)
	f, got, discarded := open(t, options(dir))
	if want := []kv.Kept{kept(0), kept(7), kept(9)}; !reflect.DeepEqual(got, want) || discarded != "" {
		t.Fatalf("found %+v (%s), want %+v", got, discarded, want)
	}
	for _, k := range got {
		data := make([]byte, block)
		if err := f.Read(k, data); err != nil || !bytes.Equal(data, content(k.Slot)) {
			t.Errorf("slot %d: %v, %v", k.Slot, data, err)
		}
	}
	if err := f.Read(kept(3), make([]byte, block)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("an empty slot: %v, want ErrCorrupt", err)
	}
}

func TestWhatIsNotOursIsDiscarded(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(o *Options)
		file   func(b []byte) []byte
		why    string
	}{
		"another model":        {change: func(o *Options) { o.Identity = "model b" }, why: "it is of model a, the node serves model b"},
		"other blocks":         {change: func(o *Options) { o.Block *= 2 }, why: "its blocks have 4 tokens and 96 bytes"},
		"other tokens":         {change: func(o *Options) { o.Tokens = 5 }, why: "its blocks have 4 tokens"},
		"a cut first page":     {file: func(b []byte) []byte { return b[:100] }, why: "cut off"},
		"a damaged first page": {file: func(b []byte) []byte { b[30] ^= 1; return b }, why: "corrupt"},
		"another format":       {file: func(b []byte) []byte { return bytes.Repeat([]byte("x"), len(b)) }, why: "no index"},
		"another version":      {file: func(b []byte) []byte { b[4] = 9; return b }, why: "version 9"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := written(t, 1, 2)
			o := options(dir)
			if tt.change != nil {
				tt.change(&o)
			}
			if tt.file != nil {
				at := filepath.Join(dir, "kv.index")
				b, err := os.ReadFile(at)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(at, tt.file(b), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			f, got, discarded := open(t, o)
			if len(got) != 0 || !strings.Contains(discarded, tt.why) {
				t.Fatalf("found %d blocks, discarded because %q, want %q", len(got), discarded, tt.why)
			}
			f.Close()
			if _, got, discarded := open(t, o); len(got) != 0 || discarded != "" {
				t.Errorf("opened again: %d blocks, discarded because %q", len(got), discarded)
			}
		})
	}
}

// TestEveryByteThatIsWrongIsSeen turns each bit of a written slot over, one at a time.
func TestEveryByteThatIsWrongIsSeen(t *testing.T) {
	dir := written(t, 0)
	for _, name := range []string{"kv.index", "kv.blocks"} {
		at := filepath.Join(dir, name)
		whole, err := os.ReadFile(at)
		if err != nil {
			t.Fatal(err)
		}
		from := 0
		if name == "kv.index" {
			from = pageBytes
		}
		for i := from; i < len(whole); i++ {
			bad := bytes.Clone(whole)
			bad[i] ^= 1 << (i % 8)
			if err := os.WriteFile(at, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			f, got, _, err := Open(options(dir))
			if err != nil {
				t.Fatal(err)
			}
			for _, k := range got {
				if err := f.Read(k, make([]byte, block)); !errors.Is(err, ErrCorrupt) {
					t.Errorf("%s, byte %d: %v, want ErrCorrupt", name, i, err)
				}
			}
			f.Close()
		}
		if err := os.WriteFile(at, whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAKillInTheMiddleOfAWriteLeavesAnEmptySlot cuts the writing of a slot that held something before after each of its steps.
func TestAKillInTheMiddleOfAWriteLeavesAnEmptySlot(t *testing.T) {
	for name, step := range map[string]func(f *Files) error{
		"emptied": func(f *Files) error { return f.empty(0) },
		"block written in part": func(f *Files) error {
			_, err := f.blocks.WriteAt(content(5)[:block/2], 0)
			return errors.Join(f.empty(0), err)
		},
		"entry written in part": func(f *Files) error {
			_, err := f.blocks.WriteAt(content(5), 0)
			k := kept(5)
			_, err2 := f.index.WriteAt(appendEntry(nil, &k, crc(content(5)))[:30], f.entryAt(0))
			return errors.Join(f.empty(0), err, err2)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := written(t, 0, 1)
			f, _, _ := open(t, options(dir))
			if err := step(f); err != nil {
				t.Fatal(err)
			}
			f.Close()
			if _, got, _ := open(t, options(dir)); len(got) != 1 || got[0].Slot != 1 {
				t.Errorf("found %+v, want slot 1 only", got)
			}
		})
	}
}

func TestOneProcessAFolder(t *testing.T) {
	dir := t.TempDir()
	open(t, options(dir))
	if _, _, _, err := Open(options(dir)); !errors.Is(err, ErrInUse) {
		t.Errorf("opened twice: %v, want ErrInUse", err)
	}
}

func TestAnotherSizeKeepsWhatFits(t *testing.T) {
	dir := written(t, 0, 3, 9)
	small := options(dir)
	small.Slots = 4
	f, got, discarded := open(t, small)
	if len(got) != 2 || got[1].Slot != 3 || discarded != "" {
		t.Errorf("4 slots: %+v, %q", got, discarded)
	}
	f.Close()
	if _, got, _ := open(t, options(dir)); len(got) != 2 {
		t.Errorf("10 slots again: %+v, want the two that fitted", got)
	}
}

// TestEntriesWithoutBytes: layers without KV of their own have blocks that only prove prefixes.
func TestEntriesWithoutBytes(t *testing.T) {
	o := options(t.TempDir())
	o.Block = 0
	f, _, _ := open(t, o)
	if err := f.Write(kept(7), nil); err != nil {
		t.Fatal(err)
	}
	f.Close()
	f, got, _ := open(t, o)
	if want := []kv.Kept{kept(7)}; !reflect.DeepEqual(got, want) {
		t.Fatalf("found %+v, want %+v", got, want)
	}
	if err := f.Read(got[0], nil); err != nil {
		t.Error(err)
	}
}

func TestNonsenseIsRefused(t *testing.T) {
	for name, change := range map[string]func(o *Options){
		"less than a block":     func(o *Options) { o.Slots = 0 },
		"too long an identity":  func(o *Options) { o.Identity = strings.Repeat("x", pageBytes) },
		"a folder that is none": func(o *Options) { o.Dir = os.DevNull },
		"a folder below a file": func(o *Options) { o.Dir = filepath.Join(os.DevNull, "x") },
	} {
		o := options(t.TempDir())
		change(&o)
		if _, _, _, err := Open(o); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	f, _, _ := open(t, options(t.TempDir()))
	if err := f.Write(kept(1), make([]byte, block-1)); err == nil {
		t.Error("half a block was written")
	}
}

func FuzzParseEntry(f *testing.F) {
	k := kept(3)
	f.Add(appendEntry(nil, &k, 77))
	f.Add(make([]byte, entryHead+4*tokens))
	f.Fuzz(func(t *testing.T, b []byte) {
		k, sum, ok := parseEntry(b)
		if !ok {
			return
		}
		if again, sum2, ok := parseEntry(appendEntry(nil, &k, sum)); !ok || sum2 != sum || !reflect.DeepEqual(again, k) {
			t.Errorf("%+v does not survive: %+v", k, again)
		}
	})
}

func BenchmarkWriteAndRead(b *testing.B) {
	const size = 128 << 10
	f, _, _, err := Open(Options{Dir: b.TempDir(), Slots: 64, Identity: "x", Tokens: 32, Block: size})
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	data, k := make([]byte, size), kv.Kept{Serial: 1, Tokens: make([]int32, 32)}
	b.SetBytes(2 * size)
	for i := 0; b.Loop(); i++ {
		k.Slot = int32(i % 64)
		if err := errors.Join(f.Write(k, data), f.Read(k, data)); err != nil {
			b.Fatal(err)
		}
	}
}
