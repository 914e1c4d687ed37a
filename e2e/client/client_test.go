package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestDo(t *testing.T) {
	const stream = "text/event-stream"
	cases := []struct {
		name, contentType string
		status            int
		body              string
		text, finish      string
		chunks            int
		err               string
	}{
		{"a stream of completions", stream, 200, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"choices\":[{\"text\":\"b\",\"finish_reason\":\"stop\"}]}\n\ndata: {\"choices\":[],\"usage\":{\"prompt_tokens\":3}}\n\ndata: [DONE]\n\n", "ab", "stop", 2, ""},
		{"a stream of chat", stream, 200, "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\"}}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\ndata: [DONE]\n\n", "x", "", 1, ""},
		{"a whole chat answer", "application/json", 200, `{"choices":[{"message":{"content":"x"},"finish_reason":"length"}]}`, "x", "length", 1, ""},
		{"a stream that breaks off", stream, 200, "data: {\"choices\":[{\"text\":\"a\"}]}\n\n", "a", "", 1, "without [DONE]"},
		{"an error inside a stream", stream, 200, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: {\"error\":{\"message\":\"gone\",\"stage\":\"gen\"}}\n\n", "a", "", 1, "stage gen"},
		{"an error with a status", "application/json", 400, `{"error":{"message":"no","param":"n"}}`, "", "", 0, "status 400: no"},
		{"an error in a whole answer", "application/json", 200, `{"error":{"message":"gone","stage":"gen"}}`, "", "", 0, "in the answer: gone"},
		{"an error that is no JSON", "text/plain", 502, "bad gateway", "", "", 0, "bad gateway"},
		{"an answer that is no JSON", "application/json", 200, "{", "", "", 0, "parse answer"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if b, _ := io.ReadAll(r.Body); string(b) != `{"prompt":"p"}` {
					t.Errorf("body %s", b)
				}
				w.Header().Set("Content-Type", c.contentType)
				w.Header().Set("X-Request-Id", r.Header.Get("X-Request-Id"))
				w.WriteHeader(c.status)
				io.WriteString(w, c.body)
			}))
			defer s.Close()
			cl := New(s.URL+"/", 1)
			defer cl.Close()
			heard := ""
			res, err := cl.Do(t.Context(), Request{ID: "me", Fields: map[string]any{"prompt": "p"}, OnText: func(s string) { heard += s }})
			if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("error %v, want %q", err, c.err)
			}
			if res.Text != c.text || heard != c.text || res.FinishReason != c.finish || len(res.Chunks) != c.chunks || res.RequestID != "me" {
				t.Errorf("result %+v, heard %q", res, heard)
			}
			if _, ok := res.TTFT(); ok != (c.chunks > 0) || res.E2E() < 0 {
				t.Errorf("TTFT known: %v", ok)
			}
		})
	}
}

func TestGetGivesTheErrorObject(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	defer s.Close()
	var status *StatusError
	if err := New(s.URL, 1).Get(t.Context(), "/x", nil); !errors.As(err, &status) || status.Status != 404 {
		t.Errorf("error %v", err)
	}
}

// A line whose last record comes late is there without it first.
func TestWholeWaitsForWhatIsAmended(t *testing.T) {
	var asked atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if asked.Add(1) == 1 {
			http.NotFound(w, r)
			return
		}
		fmt.Fprintf(w, `{"request_id":"q","complete":%v}`, r.URL.Path == "/timelines/late" && asked.Load() > 3)
	}))
	defer s.Close()
	c := New(s.URL, 1)
	defer c.Close()
	if l, err := c.Timeline(t.Context(), "late"); err != nil || l.Complete || asked.Load() != 2 {
		t.Errorf("the first line: %+v, %v, asked %d times", l, err, asked.Load())
	}
	if l, err := c.Whole(t.Context(), "late"); err != nil || !l.Complete || asked.Load() != 4 {
		t.Errorf("the whole line: %+v, %v, asked %d times", l, err, asked.Load())
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if l, err := c.Whole(ctx, "cut"); err != nil || l.Complete || l.RequestID != "q" {
		t.Errorf("a line that stays as it is: %+v, %v", l, err)
	}
}
