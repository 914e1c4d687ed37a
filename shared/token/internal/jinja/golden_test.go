package jinja

import (
	"context"
	"encoding/json"
	"os"
	"testing"
	"time"
)

// goldenNow is the date that testdata/generate.py gives.
func goldenNow() time.Time { return time.Date(2026, 3, 7, 9, 5, 3, 0, time.UTC) }

type goldenCase struct {
	Template string  `json:"template"`
	Want     *string `json:"want"`
	Error    string  `json:"error"`
}

func readGolden(t testing.TB) (cases []goldenCase, vars Dict) {
	t.Helper()
	data, err := os.ReadFile("testdata/golden.json")
	if err == nil {
		err = json.Unmarshal(data, &cases)
	}
	if err != nil {
		t.Fatal(err)
	}
	if data, err = os.ReadFile("testdata/vars.json"); err != nil {
		t.Fatal(err)
	}
	v, err := FromJSON(data)
	if err != nil {
		t.Fatal(err)
	}
	return cases, v.(Dict)
}

func renderSource(ctx context.Context, source string, o Options) (string, error) {
	tpl, err := Parse(source)
	if err != nil {
		return "", err
	}
	return tpl.Render(ctx, o)
}

// TestRendersAsPythonDoes compares with what Python's jinja2 printed, and wants an error where it raised one.
func TestRendersAsPythonDoes(t *testing.T) {
	cases, vars := readGolden(t)
	for _, c := range cases {
		got, err := renderSource(t.Context(), c.Template, Options{Vars: vars, Now: goldenNow()})
		switch {
		case c.Want == nil && err == nil:
			t.Errorf("%q\n gave %q\n want the error %s", c.Template, got, c.Error)
		case c.Want != nil && err != nil:
			t.Errorf("%q\n gave the error %v\n want %q", c.Template, err, *c.Want)
		case c.Want != nil && got != *c.Want:
			t.Errorf("%q\n gave %q\n want %q", c.Template, got, *c.Want)
		}
	}
}
