package jinja

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestFromJSON(t *testing.T) {
	tests := []struct{ name, in, want string }{
		{"keys keep their order", `{"z":1,"a":{"y":2,"b":3}}`, `{'z': 1, 'a': {'y': 2, 'b': 3}}`},
		{"of a key that comes twice the last value counts", `{"a":1,"b":2,"a":3}`, `{'a': 3, 'b': 2}`},
		{"null is None", `[null,true,false]`, `[None, True, False]`},
		{"integers stay integers", `[1,1.0,-0,1e2,12345678901234567890]`, `[1, 1.0, 0, 100.0, 12345678901234567890]`},
		{"numbers out of range are infinite", `1e999`, `inf`},
		{"text is decoded", `"\u00e9\ud83d\ude00\n"`, `'é😀\n'`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v, err := FromJSON([]byte(tt.in))
			if got := repr(v); got != tt.want || err != nil {
				t.Errorf("gave %s, %v, want %s", got, err, tt.want)
			}
		})
	}
}

func TestFromJSONRefuses(t *testing.T) {
	for name, in := range map[string]string{
		"nothing": "", "half a value": `{"a":`, "two values": `1 2`, "deep nesting": strings.Repeat("[", 5000), "no JSON": "{a}",
	} {
		if v, err := FromJSON([]byte(in)); err == nil {
			t.Errorf("%s: gave %s", name, repr(v))
		}
	}
}

// FuzzFromJSON checks that what encoding/json accepts is written back with the same meaning.
func FuzzFromJSON(f *testing.F) {
	f.Add([]byte(`{"a":[1,2.5,null,true,"x"],"b":{}}`))
	f.Add([]byte(`"\ud800"`))
	f.Fuzz(func(t *testing.T, data []byte) {
		v, err := FromJSON(data)
		if err != nil {
			return
		}
		w := jsonWriter{jsonStyle: jsonStyle{item: ",", colon: ":"}, limit: 1 << 20}
		if err := w.value(v, 0); err != nil {
			t.Fatal(err)
		}
		again, err := FromJSON([]byte(w.b.String()))
		if strings.Contains(w.b.String(), "Infinity") {
			return
		}
		if err != nil || repr(v) != repr(again) || !json.Valid([]byte(w.b.String())) {
			t.Fatalf("%q became %q (%v)", data, w.b.String(), err)
		}
	})
}
