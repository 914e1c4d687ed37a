package api

import (
	"net/http"
	"strconv"
)

// Cursor reads where a reader of a numbered sequence is: after=SEQ, or what a stream that broke ended with.
func Cursor(r *http.Request) (int64, error) {
	if id := r.Header.Get("Last-Event-ID"); id != "" && r.URL.Query().Get("after") == "" {
		return number("Last-Event-ID", id)
	}
	return QueryNumber(r, "after", 0)
}

// QueryNumber reads a whole number of 0 or more of a URL.
func QueryNumber(r *http.Request, name string, otherwise int64) (int64, error) {
	v := r.URL.Query().Get(name)
	if v == "" {
		return otherwise, nil
	}
	return number(name, v)
}

func number(name, v string) (int64, error) {
	n, err := strconv.ParseInt(v, 10, 64)
	if err != nil || n < 0 {
		return 0, Invalid(name, "%s=%q: want a whole number of 0 or more", name, v)
	}
	return n, nil
}
