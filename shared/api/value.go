package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
)

// The decode functions turn the bytes of one valid JSON value into a Go value. Their errors complete the sentence
// "field X must be ...".
var (
	errString = errors.New("a string")
	errUTF8   = errors.New("UTF-8")
	errBool   = errors.New("true or false")
	errInt    = errors.New("an integer")
	errNumber = errors.New("a number")
	errIDs    = errors.New("an array of token ids (integers from 0 to 2147483647)")
)

func isNull(v []byte) bool { return string(v) == "null" }

func decodeString(v []byte) (string, error) {
	if len(v) < 2 || v[0] != '"' {
		return "", errString
	}
	if inner := v[1 : len(v)-1]; bytes.IndexByte(inner, '\\') < 0 {
		return string(inner), nil
	}
	var s string
	if err := json.Unmarshal(v, &s); err != nil {
		return "", errString
	}
	return s, nil
}

func decodeBool(v []byte) (bool, error) {
	switch string(v) {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, errBool
}

// decodeInt wants an integer within [lo, hi].
func decodeInt(v []byte, lo, hi int64) (int64, error) {
	n, err := strconv.ParseInt(string(v), 10, 64)
	if errors.Is(err, strconv.ErrRange) || (err == nil && (n < lo || n > hi)) {
		return 0, fmt.Errorf("an integer from %d to %d", lo, hi)
	}
	if err != nil {
		return 0, errInt
	}
	return n, nil
}

// decodeFloat wants a number within [lo, hi].
func decodeFloat(v []byte, lo, hi float64) (float64, error) {
	if len(v) == 0 || (v[0] != '-' && (v[0] < '0' || v[0] > '9')) {
		return 0, errNumber
	}
	f, err := strconv.ParseFloat(string(v), 64)
	if err != nil || math.IsNaN(f) || f < lo || f > hi {
		return 0, fmt.Errorf("a number from %v to %v", lo, hi)
	}
	return f, nil
}

// decodeIDs reads an array of token ids. It is written by hand because a long prompt travels this way in every leg.
func decodeIDs(v []byte) ([]int32, error) {
	if len(v) < 2 || v[0] != '[' {
		return nil, errIDs
	}
	ids := make([]int32, 0, len(v)/5+1)
	n, digits := int64(0), 0
	for _, c := range v[1:] {
		switch {
		case c >= '0' && c <= '9':
			n = n*10 + int64(c-'0')
			digits++
			if n > math.MaxInt32 {
				return nil, errIDs
			}
		case c == ',' || c == ']':
			if digits > 0 {
				ids = append(ids, int32(n))
			}
			n, digits = 0, 0
		case c == ' ' || c == '\n' || c == '\t' || c == '\r':
		default:
			return nil, errIDs
		}
	}
	return ids, nil
}

func decodeStrings(v []byte, limit int) ([]string, error) {
	if len(v) > 0 && v[0] == '"' {
		s, err := decodeString(v)
		return []string{s}, err
	}
	var out []string
	want := fmt.Errorf("a string or an array of at most %d strings", limit)
	var bad error
	err := eachElement(v, func(elem []byte) bool {
		s, err := decodeString(elem)
		if err != nil || len(out) >= limit {
			bad = want
			return false
		}
		out = append(out, s)
		return true
	})
	if err != nil || bad != nil {
		return nil, want
	}
	return out, nil
}

// AppendIDs appends ids as a JSON array.
func AppendIDs(dst []byte, ids []int32) []byte {
	dst = append(dst, '[')
	for i, id := range ids {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = strconv.AppendInt(dst, int64(id), 10)
	}
	return append(dst, ']')
}
