package phase

import "encoding/json"

// Append appends r as one JSON object without a newline.
func Append(dst []byte, r *Record) []byte {
	b, _ := json.Marshal(r)
	return append(dst, b...)
}

// Parse reads one record.
func Parse(b []byte) (*Record, error) {
	var r Record
	return &r, json.Unmarshal(b, &r)
}
