package jinja

import (
	"context"
	"testing"
	"time"
)

// FuzzRender renders any template: it may fail, but not panic, hang or grow.
func FuzzRender(f *testing.F) {
	cases, vars := readGolden(f)
	for _, c := range cases {
		f.Add(c.Template)
	}
	f.Fuzz(func(t *testing.T, source string) {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		tpl, err := Parse(source)
		if err != nil {
			return
		}
		limits := Limits{Text: 1 << 16, Work: 1 << 20}
		out, err := tpl.Render(ctx, Options{Vars: vars, Now: goldenNow(), Limits: limits})
		if len(out) > limits.Text {
			t.Fatalf("printed %d bytes", len(out))
		}
		if err != nil && out != "" {
			t.Fatalf("gave %q with the error %v", out, err)
		}
		again, err2 := tpl.Render(ctx, Options{Vars: vars, Now: goldenNow(), Limits: limits})
		if ctx.Err() == nil && (again != out || (err == nil) != (err2 == nil)) {
			t.Fatalf("gave %q, %v and then %q, %v", out, err, again, err2)
		}
	})
}
