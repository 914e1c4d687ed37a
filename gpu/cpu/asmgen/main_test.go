package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestCommittedFilesAreWhatIsGenerated(t *testing.T) {
	dir := t.TempDir()
	if err := generate(dir); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"kernels_amd64.go", "kernels_amd64.s"} {
		want, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join("..", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s differs from what asmgen writes; run go generate in gpu/cpu", name)
		}
	}
}

func TestTilesFitTheRegisters(t *testing.T) {
	for _, s := range []isa{avx512, avx2} {
		reserved := map[byte]int{'Z': 8, 'Y': 4}[s.prefix] // w and x
		for _, mr := range s.mr {
			for _, nr := range s.nr {
				if used := mr*nr*s.regs() + reserved; used > s.registers() {
					t.Errorf("%s tile %dx%d uses %d registers", s.name, mr, nr, used)
				}
			}
		}
		for _, rows := range s.wr {
			for _, cols := range s.wc {
				if used := (rows+1)*cols/s.width + 1; used > s.registers() {
					t.Errorf("%s weigh %dx%d uses %d registers", s.name, rows, cols, used)
				}
			}
		}
	}
}

func TestEveryFunctionIsDeclared(t *testing.T) {
	dir := t.TempDir()
	if err := generate(dir); err != nil {
		t.Fatal(err)
	}
	decl, err := os.ReadFile(filepath.Join(dir, "kernels_amd64.go"))
	if err != nil {
		t.Fatal(err)
	}
	code, err := os.ReadFile(filepath.Join(dir, "kernels_amd64.s"))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(code)) {
		name, ok := strings.CutPrefix(line, "TEXT ·")
		if !ok {
			continue
		}
		n++
		if name = name[:strings.Index(name, "(")]; !strings.Contains(string(decl), "func "+name+"(") {
			t.Errorf("%s is not declared", name)
		}
	}
	if n == 0 {
		t.Error("no function is generated")
	}
}
