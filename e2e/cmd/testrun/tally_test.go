package main

import (
	"strings"
	"testing"
)

func TestTally(t *testing.T) {
	in := `{"Action":"output","Package":"p","Test":"A","Output":"quiet\n"}
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"output","Package":"p","Test":"B","Output":"    b_test.go:3: no root: skipped\n"}
{"Action":"skip","Package":"p","Test":"B"}
{"Action":"output","Package":"p","Test":"E","Output":"    suite.go:63: no stages\n"}
{"Action":"skip","Package":"p","Test":"E"}
{"Action":"output","Package":"p","Test":"F","Output":"    suite.go:70: log: kernel 6.1\n"}
{"Action":"output","Package":"p","Test":"F","Output":"    suite.go:71: old kernel\n"}
{"Action":"output","Package":"p","Test":"F","Output":"--- SKIP: F (0.00s)\n"}
{"Action":"skip","Package":"p","Test":"F"}
{"Action":"output","Package":"p","Test":"C","Output":"loud\n"}
{"Action":"fail","Package":"p","Test":"C"}
{"Action":"output","Package":"p","Test":"D","Output":"panic: x\n"}
{"Action":"fail","Package":"p"}
{"Action":"skip","Package":"q"}
no json
`
	var out strings.Builder
	c := newTally(&out)
	if err := c.read(strings.NewReader(in)); err != nil {
		t.Fatal(err)
	}
	c.summary()
	got := out.String()
	for _, want := range []string{"loud\n", "panic: x\n", "no json\n", "FAIL p", "skipped 1: no root: skipped", "skipped 1: no stages", "skipped 1: old kernel", "1 passed, 1 failed, 3 skipped"} {
		if !strings.Contains(got, want) {
			t.Errorf("output lacks %q:\n%s", want, got)
		}
	}
	if strings.Contains(got, "quiet") || strings.Contains(got, " q ") {
		t.Errorf("output says too much:\n%s", got)
	}
}
