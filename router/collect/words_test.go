package collect

import (
	"reflect"
	"testing"
	"unsafe"

	"meridian.internal/shared/phase"
)

func TestADetachedRecordSharesNothingWithItsText(t *testing.T) {
	full := rec(phase.Disagg, "a")
	fill(reflect.ValueOf(full), new(int))
	full.Schema, full.Stamps.Clock = phase.Schema, 0
	want, err := phase.Parse(phase.Append(nil, full))
	if err != nil {
		t.Fatal(err)
	}
	got, err := phase.Parse(phase.Append(nil, full))
	if err != nil {
		t.Fatal(err)
	}
	// The text is one allocation, so that a record's first and last string tell where it is.
	low, high := ^uintptr(0), uintptr(0)
	eachString(reflect.ValueOf(got), func(s string) {
		at := uintptr(unsafe.Pointer(unsafe.StringData(s)))
		low, high = min(low, at), max(high, at+uintptr(len(s)))
	})
	words{}.detach(got)
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("%+v\nwant\n%+v", got, want)
	}
	eachString(reflect.ValueOf(got), func(s string) {
		if at := uintptr(unsafe.Pointer(unsafe.StringData(s))); at >= low && at < high {
			t.Errorf("%q still is a part of the text", s)
		}
	})
}

// fill gives every string of a value a text of its own, and makes what is nil.
func fill(v reflect.Value, n *int) {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			v.Set(reflect.New(v.Type().Elem()))
		}
		fill(v.Elem(), n)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), n)
	case reflect.String:
		*n++
		v.SetString("text-" + string(rune('a'+*n/26)) + string(rune('a'+*n%26)))
	}
}

// eachString calls f with every string of a value.
func eachString(v reflect.Value, f func(string)) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			eachString(v.Elem(), f)
		}
	case reflect.Struct:
		for i := range v.NumField() {
			eachString(v.Field(i), f)
		}
	case reflect.Slice:
		for i := range v.Len() {
			eachString(v.Index(i), f)
		}
	case reflect.String:
		if v.Len() > 0 {
			f(v.String())
		}
	}
}
