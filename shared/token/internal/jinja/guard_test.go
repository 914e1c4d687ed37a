package jinja

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestHostileTemplatesEndInAnError(t *testing.T) {
	endless := "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
	closing, long := strings.Repeat("{% endfor %}", 3), strings.Repeat("x", 5000)
	tests := []struct {
		name     string
		template string
		want     error // nil: any
	}{
		{"a loop without end that prints nothing", endless + closing, context.DeadlineExceeded},
		{"a loop without end that computes", endless + "{% set x = a * b %}" + closing, context.DeadlineExceeded},
		{"a loop without end that prints", endless + long + closing, errTooLong},
		{"a loop without end that prints into a variable", "{% set v %}" + endless + long + closing + "{% endset %}", errTooLong},
		{"a macro that calls itself", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", errTooDeep},
		{"a text that is repeated", "{{ 'aaaaaaaa' * 999999999999 }}", errTooLong},
		{"a list that is repeated", "{{ ([1] * 999999999999)|length }}", errTooLong},
		{"a text that doubles", "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", errTooLong},
		{"a text that doubles by ~", "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}", errTooLong},
		{"a list of long texts", "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + ['a' * 999999 ~ i] %}{% endfor %}", errTooMuch},
		{"a replacement that grows", "{{ ('a' * 99999).replace('a', 'a' * 99999) }}", errTooLong},
		{"a join that grows", "{{ range(99999)|join('a' * 99999) }}", errTooLong},
		{"an indent that grows", "{{ ('\\n' * 999999)|indent(999, blank=true) }}", errTooLong},
		{"a json text that grows", "{{ [[[['a' * 999999] * 99] * 99] * 99] | tojson }}", errTooLong},
		{"shared lists, printed", sharedLists + "{{ ns.x }}", errTooLong},
		{"shared lists, joined", sharedLists + "{{ ns.x|join }}", errTooLong},
		{"shared lists, compared", sharedLists + "{{ ns.x == ns.y }}", errTooLong},
		{"shared lists, sorted", sharedLists + "{{ [ns.x, ns.y]|sort }}", errTooLong},
		{"shared lists, sought", sharedLists + "{{ ns.x in [ns.y] }}", errTooLong},
		{"shared lists, sought by a method", sharedLists + "{{ [ns.x].count(ns.y) }}", errTooLong},
		{"shared lists, tested", sharedLists + "{{ ns.x is eq(ns.y) }}", errTooLong},
		{"shared lists, once each", sharedLists + "{{ [ns.x, ns.y]|unique|list|length }}", errTooLong},
		{"shared lists as json", sharedLists + "{{ ns.x|tojson }}", errTooLong},
		{"brackets without end", "{{ " + strings.Repeat("(", 100_000), nil},
		{"conditionals without end", "{{ " + strings.Repeat("1 if 0 else ", 10_000) + "2 }}", nil},
		{"a template that is too long", strings.Repeat("x", maxSource+1), nil},
		{"a recursive loop", "{% for x in l recursive %}{{ loop(x) }}{% endfor %}", nil},
		{"reading a file by include", "{% include '/etc/passwd' %}", nil},
		{"reading a file by import", "{% import '/etc/passwd' as x %}", nil},
		{"reading a file by extends", "{% extends '/etc/passwd' %}", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			limit := time.Minute
			if errors.Is(tt.want, context.DeadlineExceeded) {
				limit = 100 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			out, err := renderSource(ctx, tt.template, Options{Limits: Limits{Text: 4 << 20, Work: 64 << 20}})
			if err == nil {
				t.Fatalf("gave %d bytes", len(out))
			}
			if tt.want != nil && !errors.Is(err, tt.want) {
				t.Fatalf("gave %v, want %v", err, tt.want)
			}
			if len(err.Error()) > 500 {
				t.Fatalf("the message has %d bytes: %.200s", len(err.Error()), err)
			}
		})
	}
}

// sharedLists makes two lists of forty that hold 2^40 elements, written out.
const sharedLists = "{% set ns = namespace(x=['a'], y=['a']) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"

func TestDeepNestingOfStatementsRenders(t *testing.T) {
	const depth = 2000
	source := strings.Repeat("{% if true %}", depth) + "x" + strings.Repeat("{% endif %}", depth)
	if out, err := renderSource(t.Context(), source, Options{}); out != "x" || err != nil {
		t.Fatalf("gave %q, %v", out, err)
	}
}

func TestARaisedExceptionKeepsItsMessage(t *testing.T) {
	_, err := renderSource(t.Context(), "{% for x in [1] %}{% if x %}{{ raise_exception('bad role: ' ~ x) }}{% endif %}{% endfor %}", Options{})
	var raised *RaisedError
	if !errors.As(err, &raised) || raised.Message != "bad role: 1" {
		t.Fatalf("gave %v", err)
	}
}

func TestAnErrorNamesTheLine(t *testing.T) {
	for source, line := range map[string]string{
		"a\n\n{{ 1 ! 2 }}":                     "line 3",
		"{# x\n #}\n{{ [1,\n2] }}\n{% nope %}": "Line: 5",
		"a\n{% if true %}\nb":                  "EOF",
	} {
		_, err := Parse(source)
		if err == nil || !strings.Contains(err.Error(), line) {
			t.Errorf("%q gave %v, want %q in it", source, err, line)
		}
	}
}

func TestOneTemplateRendersInManyGoroutines(t *testing.T) {
	tpl, err := Parse("{% macro m(x) %}<{{ x }}>{% endmacro %}{% set ns = namespace(n=0) %}{% for i in range(50) %}{% set ns.n = ns.n + i * k %}{% endfor %}{{ m(ns.n) }}")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for k := range 8 {
		wg.Go(func() {
			out, err := tpl.Render(t.Context(), Options{Vars: Dict{{"k", k}}})
			if want := "<" + repr(1225*k) + ">"; out != want || err != nil {
				t.Errorf("gave %q, %v, want %q", out, err, want)
			}
		})
	}
	wg.Wait()
}

func TestACancelledContextRendersNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := renderSource(ctx, "x", Options{}); !errors.Is(err, context.Canceled) {
		t.Fatalf("gave %v", err)
	}
}
