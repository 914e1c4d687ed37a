package chaos

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestEveryReportedFaultNamesTestsThatExist keeps docs/faults.md true: 44 rows, each with what holds, and tests that are there.
func TestEveryReportedFaultNamesTestsThatExist(t *testing.T) {
	doc, err := os.ReadFile("../../docs/faults.md")
	if err != nil {
		t.Fatal(err)
	}
	tests := allTests(t)
	row, named := 0, regexp.MustCompile(`\bTest[A-Z]\w+`)
	for line := range strings.Lines(string(doc)) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		n, err := strconv.Atoi(strings.TrimSpace(cells[0]))
		if err != nil {
			continue
		}
		row++
		if n != row || len(cells) != 4 || len(cells[3]) < 10 {
			t.Errorf("row %d is numbered %d and has %d cells: want the next number and 4 cells", row, n, len(cells))
			continue
		}
		for _, name := range named.FindAllString(cells[3], -1) {
			if !tests[name] {
				t.Errorf("row %d names %s, which does not exist", n, name)
			}
		}
	}
	if row != 44 {
		t.Errorf("%d rows, want 44", row)
	}
}

// TestDocumentsNameTestsThatExist is for all the others.
func TestDocumentsNameTestsThatExist(t *testing.T) {
	docs, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(docs) < 10 {
		t.Fatalf("%d documents, %v", len(docs), err)
	}
	tests, named := allTests(t), regexp.MustCompile(`\bTest[A-Z]\w+`)
	for _, path := range docs {
		doc, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range named.FindAllString(string(doc), -1) {
			if !tests[name] {
				t.Errorf("%s names %s, which does not exist", filepath.Base(path), name)
			}
		}
	}
}

func allTests(t *testing.T) map[string]bool {
	t.Helper()
	tests, declared := map[string]bool{}, regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err := filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		src, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(src, -1) {
			tests[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return tests
}
