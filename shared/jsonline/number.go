package jsonline

import (
	"math"
	"strconv"
	"strings"
)

// maxFastDigits is how many decimal digits fit 63 bits whatever they are.
const maxFastDigits = 18

// Int reads an integer; null is 0.
func (r *Reader) Int() int64 {
	c := r.peek()
	neg := c == '-'
	if neg {
		r.i++
	}
	start := r.i
	text := r.s[start:]
	var v uint64
	i := 0
	for ; i < len(text) && text[i]-'0' <= 9; i++ {
		d := uint64(text[i] - '0')
		if i >= maxFastDigits && v > (math.MaxInt64-d)/10 && !(neg && v == math.MaxInt64/10 && d == 8) {
			r.i = start + i
			r.Fail("an integer of 64 bits")
			return 0
		}
		v = v*10 + d
	}
	r.i = start + i
	digits := r.i - start
	switch {
	case digits == 0 && !neg && r.Null():
		return 0
	case digits == 0, digits > 1 && r.s[start] == '0', r.i < len(r.s) && strings.IndexByte(".eE", r.s[r.i]) >= 0:
		r.i = start
		r.Fail("an integer")
		return 0
	case neg:
		return -int64(v)
	}
	return int64(v)
}

// IntString reads an integer that may be quoted, as 64-bit ids are.
func (r *Reader) IntString() int64 {
	if r.peek() != '"' {
		return r.Int()
	}
	at := r.i
	s := r.String()
	v, err := strconv.ParseInt(s, 10, 64)
	if err != nil && r.err == nil {
		r.i = at
		r.Fail("an integer in quotes")
	}
	return v
}

// IntPtr reads an integer; null is nil.
func (r *Reader) IntPtr() *int64 {
	if r.Null() {
		return nil
	}
	v := r.Int()
	return &v
}

// Float reads a number; null is 0.
func (r *Reader) Float() float64 {
	if r.Null() {
		return 0
	}
	r.peek()
	start := r.i
	for r.i < len(r.s) && strings.IndexByte("+-0123456789.eE", r.s[r.i]) >= 0 {
		r.i++
	}
	text := r.s[start:r.i]
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || !numberShape(text) {
		r.i = start
		r.Fail("a number")
		return 0
	}
	return v
}

// numberShape refuses what ParseFloat takes and JSON does not: "+1", ".5", "01", "1.".
func numberShape(s string) bool {
	s = strings.TrimPrefix(s, "-")
	dot := strings.IndexByte(s, '.')
	return s != "" && s[0] >= '0' && s[0] <= '9' && !(len(s) > 1 && s[0] == '0' && s[1] >= '0' && s[1] <= '9') &&
		(dot < 0 || dot+1 < len(s) && s[dot+1] >= '0' && s[dot+1] <= '9')
}

// skipNumber steps over a number by its grammar, without computing it.
func (r *Reader) skipNumber() {
	start := r.i
	digits := func() bool {
		from := r.i
		for r.i < len(r.s) && r.s[r.i]-'0' <= 9 {
			r.i++
		}
		return r.i > from
	}
	at := func(set string) bool { return r.i < len(r.s) && strings.IndexByte(set, r.s[r.i]) >= 0 }
	if at("-") {
		r.i++
	}
	zero := at("0")
	first := r.i
	ok := digits() && !(zero && r.i > first+1)
	if ok && at(".") {
		r.i++
		ok = digits()
	}
	if ok && at("eE") {
		if r.i++; at("+-") {
			r.i++
		}
		ok = digits()
	}
	if !ok {
		r.i = start
		r.Fail("a value")
	}
}
