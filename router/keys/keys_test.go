package keys

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func sum(secret string) string {
	s := sha256.Sum256([]byte(secret))
	return hex.EncodeToString(s[:])
}

func file(entries ...string) string { return "keys:\n  - " + strings.Join(entries, "\n  - ") + "\n" }

func entryOf(id, secret, more string) string {
	return fmt.Sprintf("{id: %s, sha256: %s%s}", id, sum(secret), more)
}

func TestParseNamesWhatIsWrong(t *testing.T) {
	good := entryOf("a", "x", "")
	for name, c := range map[string]struct{ text, want string }{
		"a misspelt limit":           {file(entryOf("a", "x", ", max_runs: 3")), "max_runs"},
		"a member twice":             {file(entryOf("a", "x", ", admin: true, admin: false")), "admin"},
		"no keys":                    {"keys: []\n", "no keys"},
		"an empty file":              {"", "want keys"},
		"two documents":              {file(good) + "---\nkeys: []\n", "more than one"},
		"an id twice":                {file(good, entryOf("a", "y", "")), `id "a" is given twice`},
		"a key twice":                {file(good, entryOf("b", "x", "")), "same sha256"},
		"an id that could break out": {file(entryOf(`"a\nb"`, "x", "")), "letters, digits"},
		"a key instead of its hash":  {file("{id: a, sha256: secret}"), "64 hex digits"},
		"a negative limit":           {file(entryOf("a", "x", ", max_running: -1")), "max_running: -1"},
		"an empty model":             {file(entryOf("a", "x", `, models: [""]`)), "models"},
	} {
		if _, err := Parse([]byte(c.text)); !errors.Is(err, ErrFile) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want ErrFile with %q", name, err, c.want)
		}
	}
	keys, err := Parse([]byte(file(entryOf("a", "x", ", admin: true, models: [m, n], requests_per_minute: 1, tokens_per_minute: 2, max_running: 3, max_priority: -4"))))
	if err != nil {
		t.Fatal(err)
	}
	k := keys[0]
	if k.ID != "a" || !k.Admin || strings.Join(k.Models, "") != "mn" || k.RequestsPerMinute != 1 || k.TokensPerMinute != 2 || k.MaxRunning != 3 || *k.MaxPriority != -4 {
		t.Errorf("key %+v", k)
	}
}

// TestAFileThatWouldTakeLongIsRefused: the YAML decoder compares the members of a mapping with each other and follows aliases.
func TestAFileThatWouldTakeLongIsRefused(t *testing.T) {
	var wide strings.Builder
	for i := range 60_000 {
		fmt.Fprintf(&wide, "k%d: 1\n", i)
	}
	for name, text := range map[string]string{
		"a wide mapping": wide.String(), "a wide mapping in the second document": "keys: []\n---\n" + wide.String(),
		"deep": "keys: " + strings.Repeat("[", 5000) + strings.Repeat("]", 5000), "aliases": "keys: &a [*a]",
	} {
		if _, err := Parse([]byte(text)); !errors.Is(err, ErrFile) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(file(entryOf("a", "x", ", models: [m]"))))
	f.Add([]byte(`{"keys":[{"id":"a","sha256":"` + sum("x") + `"}]}`))
	f.Add([]byte("keys: &a [*a]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		keys, err := Parse(b)
		if err != nil {
			if !errors.Is(err, ErrFile) {
				t.Errorf("error %v is none of the documented ones", err)
			}
			return
		}
		for _, k := range keys {
			if !validID(k.ID) || len(k.SHA256) != 64 || k.MaxRunning < 0 {
				t.Errorf("key %+v passed", k)
			}
		}
	})
}

// open writes a file of keys and opens it.
func open(t *testing.T, text string) (*Store, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "keys.yaml")
	write(t, path, text)
	s, err := Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return s, path
}

// write replaces the file as an editor does: by a rename, so that nobody reads half of it.
func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path+"~", []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+"~", path); err != nil {
		t.Fatal(err)
	}
}

func TestFindKnowsOnlyTheWholeKey(t *testing.T) {
	s, _ := open(t, file(entryOf("a", "secret-of-a", ""), entryOf("root", "secret-of-root", ", admin: true")))
	if p, admin := s.Find("secret-of-a"); p == nil || p.ID() != "a" || admin {
		t.Errorf("a is %v, admin %v", p, admin)
	}
	if p, admin := s.Find("secret-of-root"); p == nil || !admin {
		t.Errorf("root is %v, admin %v", p, admin)
	}
	for name, secret := range map[string]string{
		"nothing": "", "a part": "secret-of-", "more": "secret-of-a ", "the hash": sum("secret-of-a"), "the id": "a",
		"a huge one": strings.Repeat("x", 1<<20), "a NUL behind": "secret-of-a\x00",
	} {
		if p, _ := s.Find(secret); p != nil {
			t.Errorf("%s was taken for a key", name)
		}
	}
}

func TestReload(t *testing.T) {
	s, path := open(t, file(entryOf("a", "1", ", max_running: 1"), entryOf("b", "2", "")))
	a, _ := s.Find("1")
	now := time.Now()
	if err := a.Begin(now); err != nil {
		t.Fatal(err)
	}
	write(t, path, file(entryOf("a", "3", ", max_running: 1"))) // a has a new key, b is gone
	s.Reload()
	if p, _ := s.Find("1"); p != nil {
		t.Error("the old key of a is still in force")
	}
	if p, _ := s.Find("2"); p != nil {
		t.Error("b is still in force")
	}
	again, _ := s.Find("3")
	if again != a {
		t.Fatal("a has lost what it is running")
	}
	if err := again.Begin(now); err == nil {
		t.Error("a new key doubled what a may run")
	}
	for name, text := range map[string]string{"a broken file": "keys: [", "an empty one": "", "none": "-"} {
		if text == "-" {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		} else {
			write(t, path, text)
		}
		s.Reload()
		if p, _ := s.Find("3"); p == nil || s.Err() == nil {
			t.Errorf("%s: key found %v, error %v; want the keys before and an error", name, p != nil, s.Err())
		}
	}
	write(t, path, file(entryOf("c", "4", "")))
	s.Reload()
	if p, _ := s.Find("4"); p == nil || s.Err() != nil {
		t.Errorf("the repaired file is not in force: %v", s.Err())
	}
}

func TestReloadWhileRequestsRun(t *testing.T) {
	texts := []string{file(entryOf("a", "1", ", max_running: 100")), file(entryOf("a", "1", ""), entryOf("b", "2", ""))}
	s, path := open(t, texts[0])
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 500 {
				p, _ := s.Find("1")
				if p == nil {
					t.Error("the key that is in every file was not found")
					return
				}
				if p.Begin(time.Now()) == nil {
					p.End(time.Now(), 1)
				}
			}
		})
	}
	for i := range 100 {
		write(t, path, texts[i%2])
		s.Reload()
	}
	all.Wait()
	p, _ := s.Find("1")
	if p.running != 0 {
		t.Errorf("%d requests are still counted", p.running)
	}
}

func TestLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &Principal{key: Key{ID: "a", RequestsPerMinute: 60, TokensPerMinute: 600, MaxRunning: 100}}
		refused := func(limit string, after time.Duration) {
			t.Helper()
			var r *Refused
			if err := p.Begin(time.Now()); !errors.As(err, &r) || r.Limit != limit || r.After != after {
				t.Errorf("got %+v, want %s after %s", r, limit, after)
			}
		}
		for range 60 {
			if err := p.Begin(time.Now()); err != nil {
				t.Fatal(err)
			}
			p.End(time.Now(), 0)
		}
		refused("requests_per_minute", time.Second)
		time.Sleep(time.Second)
		if err := p.Begin(time.Now()); err != nil {
			t.Fatal("after Retry-After:", err)
		}
		p.End(time.Now(), 620) // 20 more than a minute's worth
		refused("tokens_per_minute", 2100*time.Millisecond)
		time.Sleep(2100 * time.Millisecond)
		if err := p.Begin(time.Now()); err != nil {
			t.Fatal("after Retry-After:", err)
		}
		p.End(time.Now(), 0)

		p.key.MaxRunning = 1
		if err := p.Begin(time.Now()); err != nil {
			t.Fatal(err)
		}
		refused("max_running", time.Second)
		p.End(time.Now(), 0)
	})
}

func TestModelsAndPriority(t *testing.T) {
	top := 3
	p := &Principal{key: Key{Models: []string{"m"}, MaxPriority: &top}}
	if !p.MayUse("m") || p.MayUse("other") || p.Priority(9) != 3 || p.Priority(-1) != -1 {
		t.Error("models or priority are not kept to")
	}
	if free := (&Principal{}); !free.MayUse("other") || free.Priority(9) != 9 {
		t.Error("a key without limits is limited")
	}
}

func BenchmarkFind(b *testing.B) {
	list := make([]string, 1000)
	for i := range list {
		list[i] = entryOf(fmt.Sprint("k", i), fmt.Sprint("secret", i), "")
	}
	path := filepath.Join(b.TempDir(), "k")
	if err := os.WriteFile(path, []byte(file(list...)), 0o600); err != nil {
		b.Fatal(err)
	}
	s, err := Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if p, _ := s.Find("secret500"); p == nil {
			b.Fatal("not found")
		}
	}
}

// A file that could not be read for a moment, and is as it was then, is read again: a key that was taken away does not stay for it.
func TestAFileThatCouldNotBeReadIsReadAgain(t *testing.T) {
	file := func(ids ...string) []byte {
		text := "keys:\n"
		for _, id := range ids {
			text += fmt.Sprintf("- {id: %s, sha256: \"%x\"}\n", id, sha256.Sum256([]byte("secret-"+id)))
		}
		return []byte(text)
	}
	path := filepath.Join(t.TempDir(), "keys")
	if err := os.WriteFile(path, file("a", "gone"), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Open(path, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.WriteFile(path+".new", file("a"), 0o600), os.Rename(path+".new", path)); err != nil {
		t.Fatal(err)
	}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	none := limit
	none.Cur = 0
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &none); err != nil {
		t.Skipf("files cannot be made unreadable: %v", err)
	}
	s.Reload()
	failed := s.Err()
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	if failed == nil {
		t.Skip("the file could be read without descriptors")
	}
	s.Reload()
	if p, _ := s.Find("secret-gone"); p != nil || s.Err() != nil {
		t.Errorf("the key that was taken away is still taken: %t, %v", p != nil, s.Err())
	}
}

// A list of models that is empty allows nothing, or all: it is refused, and so is one without a value.
func TestModelsThatSayNothingAreRefused(t *testing.T) {
	for _, models := range []string{"models:", "models: null", "models: []"} {
		file := fmt.Sprintf("keys:\n- id: a\n  sha256: \"%x\"\n  %s\n", sha256.Sum256([]byte("x")), models)
		if _, err := Parse([]byte(file)); !errors.Is(err, ErrFile) || !strings.Contains(err.Error(), "leave it out") {
			t.Errorf("%s: %v", models, err)
		}
	}
}
