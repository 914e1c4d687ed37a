package jsonline

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
)

func TestReaderRefusesWhatIsNoJSON(t *testing.T) {
	cases := map[string]string{
		"comma before the first item": `[,1]`, "comma before the end": `[1,]`, "key without value": `{"a":}`, "no colon": `{"a" 1}`,
		"comma before the first key": `{,"a":1}`, "comma after the last key": `{"a":1,}`, "single quotes": `{'a':1}`,
		"open string": `"abc`, "control character": "\"a\nb\"", "unknown escape": `"\x"`, "half an escape": `"\u12"`, "leading zero": `01`,
		"leading plus": `+1`, "point at the end": `1.`, "point at the start": `.5`, "mixed brackets": `[1}`, "text after the end": `1 2`,
		"nothing": ``, "bare word": `nul`, "deep nesting": strings.Repeat("[", 1000),
	}
	for name, text := range cases {
		r := NewReader(text)
		r.Skip()
		if err := r.End(); !errors.Is(err, ErrSyntax) {
			t.Errorf("%s: %q gives %v, want ErrSyntax", name, text, err)
		}
	}
}

func TestIntLimits(t *testing.T) {
	cases := []struct {
		text string
		want int64
		ok   bool
	}{
		{"9223372036854775807", math.MaxInt64, true}, {"-9223372036854775808", math.MinInt64, true}, {"9223372036854775808", 0, false},
		{"-9223372036854775809", 0, false}, {"99999999999999999999", 0, false}, {"0", 0, true}, {"-0", 0, true}, {"-", 0, false},
		{"1.5", 0, false}, {"1e3", 0, false}, {"007", 0, false}, {"null", 0, true}, {`"5"`, 0, false},
	}
	for _, c := range cases {
		r := NewReader(c.text)
		got := r.Int()
		if err := r.End(); (err == nil) != c.ok || got != c.want {
			t.Errorf("%s: %d, %v; want %d, ok %v", c.text, got, err, c.want, c.ok)
		}
	}
}

// FuzzPass wants Pass to end where Skip does, wherever Skip finds a value.
func FuzzPass(f *testing.F) {
	for _, s := range []string{`{"a":[1,{"b":"]}\\\""}]}`, `[[[]],{}] `, ` 1`, `"x"`, `[`, `["\`, `{"a"`, `[}`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		skip, pass := NewReader(s), NewReader(s)
		skip.Skip()
		pass.Pass()
		if skip.Err() == nil && (pass.Err() != nil || pass.Offset() != skip.Offset()) {
			t.Errorf("%q: passed to %d (%v), skipped to %d", s, pass.Offset(), pass.Err(), skip.Offset())
		}
		if !errors.Is(pass.Err(), ErrSyntax) && pass.Err() != nil {
			t.Errorf("undocumented error %v", pass.Err())
		}
	})
}

// FuzzSkip compares what the reader takes with encoding/json, and its strings and numbers too.
func FuzzSkip(f *testing.F) {
	for _, s := range []string{`{"a":[1,2.5e3,-0,true,false,null,"x\u00e9\ud83d\ude00"]}`, `"\ud83d"`, `[[[]],{}]`, ` 1 `, "\"\xff\"", `{"a":1,"a":2}`, `"\ud83dA"`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r := NewReader(s)
		raw := r.Raw()
		err := r.End()
		if err != nil && !errors.Is(err, ErrSyntax) {
			t.Fatalf("undocumented error %v", err)
		}
		if valid := json.Valid([]byte(s)); err == nil && !valid {
			t.Errorf("%q taken, but it is no JSON (raw %q)", s, raw)
		} else if err != nil && valid && depth(s) <= maxDepth && !strings.Contains(err.Error(), "number") {
			t.Errorf("%q refused: %v", s, err)
		}
		var want string
		if json.Unmarshal([]byte(s), &want) == nil && strings.HasPrefix(strings.TrimSpace(s), `"`) {
			if got := NewReader(s).String(); got != want {
				t.Errorf("%q reads as %q, want %q", s, got, want)
			}
		}
	})
}

func depth(s string) int { return strings.Count(s, "[") + strings.Count(s, "{") }

func FuzzAppendString(f *testing.F) {
	for _, s := range []string{"plain", "quote\" back\\ line\n\t\r\b\f\x01", "é漢😀\u2028\u2029", "bad\xff\xfeutf", "<script>&", "\x7f", "req-01234567\"9", "01234567\x1f9abcdef", "0123456789abcde\\", "01234567é"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		var want bytes.Buffer
		enc := json.NewEncoder(&want)
		enc.SetEscapeHTML(false)
		enc.Encode(s)
		if got := string(AppendString(nil, s)); got != strings.TrimSuffix(want.String(), "\n") {
			t.Errorf("%q: %s, want %s", s, got, want.String())
		}
	})
}

func TestAppendFloatEqualsEncodingJSON(t *testing.T) {
	for _, v := range []float64{0, 1, -1.5, 1e-7, 1e21, 123456789.25, math.SmallestNonzeroFloat64, math.MaxFloat64, 0.1} {
		want, _ := json.Marshal(v)
		if got := AppendFloat(nil, v); string(got) != string(want) {
			t.Errorf("%v: %s, want %s", v, got, want)
		}
	}
	if got := string(AppendFloat(nil, math.NaN())); got != "null" {
		t.Errorf("NaN: %s", got)
	}
}

func TestWriterPutsCommasWhereTheyBelong(t *testing.T) {
	one := int64(1)
	var w Writer
	w.Open('{')
	w.Str("s", "a")
	w.OptStr("gone", "")
	w.OpenKey("a", '[')
	w.ItemInt(1)
	w.ItemStr("x")
	w.ItemPtr(nil)
	w.ItemPtr(&one)
	w.ItemFloat(0.5)
	w.Open('{')
	w.Int("n", -2)
	w.Close('}')
	w.Close(']')
	w.OpenKey("e", '[')
	w.Close(']')
	w.NullInt("m", nil)
	w.NullInt("o", &one)
	w.PtrInt("gone", nil)
	w.OptInt("gone", 0)
	w.Bool("b", true)
	w.Float("f", 0.5)
	w.Raw("r", "[]")
	w.Close('}')
	want := `{"s":"a","a":[1,"x",null,1,0.5,{"n":-2}],"e":[],"m":null,"o":1,"b":true,"f":0.5,"r":[]}`
	if string(w.B) != want || !json.Valid(w.B) {
		t.Errorf("%s\nwant %s", w.B, want)
	}
}
