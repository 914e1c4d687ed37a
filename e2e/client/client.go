// Package client is a small OpenAI client that measures: when the answer began, when each chunk of text came, how it
// ended. It knows only the public API of the router and retries nothing.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"meridian.internal/shared/api"
	"meridian.internal/shared/sse"
)

const maxBody = 16 << 20

// ErrNoEnd is returned when a stream ended without its end mark.
var ErrNoEnd = errors.New("client: stream ended without [DONE]")

// StatusError is an error object that the server answered, with a status or inside an answer.
type StatusError struct {
	Status    int    // 0: it came inside an answer
	Message   string `json:"message"`
	Type      string `json:"type"`
	Param     string `json:"param"`
	Stage     string `json:"stage"`
	Retryable bool   `json:"retryable"`
	RequestID string `json:"request_id"`
	// RetryAfter is the header, "" without one.
	RetryAfter string `json:"-"`
}

// Error says what the server said.
func (e *StatusError) Error() string {
	where := "in the answer"
	if e.Status != 0 {
		where = fmt.Sprintf("status %d", e.Status)
	}
	return fmt.Sprintf("%s: %s (type %s, stage %s)", where, e.Message, e.Type, e.Stage)
}

// Request is one call. A chat request has Messages, a completion has Prompt.
type Request struct {
	ID     string         // X-Request-Id; empty: the router makes one
	Chat   bool           // /v1/chat/completions
	Fields map[string]any // body; "stream" decides how the answer is read
	OnText func(string)   // called for each piece of text; may be nil
}

// Result is what came back. Stamps are zero for what did not happen.
type Result struct {
	RequestID    string
	Text         string
	FinishReason string
	Usage        *api.Usage
	Sent         time.Time
	Headers      time.Time
	Chunks       []time.Time // arrival of each event that carried text; one entry when not streamed
	End          time.Time
}

// TTFT is the time to the first text; ok is false when there was none.
func (r *Result) TTFT() (d time.Duration, ok bool) {
	if len(r.Chunks) == 0 {
		return 0, false
	}
	return r.Chunks[0].Sub(r.Sent), true
}

// E2E is the time to the end of the answer.
func (r *Result) E2E() time.Duration { return r.End.Sub(r.Sent) }

// Client calls one server. Safe for concurrent use.
type Client struct {
	base string
	http *http.Client
}

// New makes a client of the server at base (http://host:port) that keeps up to conns connections open.
func New(base string, conns int) *Client {
	t := &http.Transport{MaxIdleConns: conns, MaxIdleConnsPerHost: conns, MaxConnsPerHost: 0, DisableCompression: true}
	return &Client{base: strings.TrimSuffix(base, "/"), http: &http.Client{Transport: t}}
}

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Do sends the request and reads the answer to its end. The result holds what had come when an error ended it.
func (c *Client) Do(ctx context.Context, r Request) (*Result, error) {
	res := &Result{}
	body, err := json.Marshal(r.Fields)
	if err != nil {
		return res, fmt.Errorf("encode request: %w", err)
	}
	path := "/v1/completions"
	if r.Chat {
		path = "/v1/chat/completions"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+path, bytes.NewReader(body))
	if err != nil {
		return res, err
	}
	req.Header.Set("Content-Type", "application/json")
	if r.ID != "" {
		req.Header.Set(api.HeaderRequestID, r.ID)
	}
	res.Sent = time.Now()
	defer func() { res.End = time.Now() }()
	resp, err := c.http.Do(req)
	if err != nil {
		return res, err
	}
	defer resp.Body.Close()
	res.Headers, res.RequestID = time.Now(), resp.Header.Get(api.HeaderRequestID)
	if resp.StatusCode != http.StatusOK {
		return res, readError(resp)
	}
	read := res.readWhole
	if strings.HasPrefix(resp.Header.Get("Content-Type"), sse.ContentType) {
		read = res.readStream
	}
	if err = read(resp.Body, r.OnText); err != nil && ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err) // a read that is cut says only that its connection is closed
	}
	return res, err
}

func readError(resp *http.Response) error {
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	var outer struct{ Error *StatusError }
	if json.Unmarshal(b, &outer) != nil || outer.Error == nil {
		outer.Error = &StatusError{Message: string(b), Type: "unparsable"}
	}
	outer.Error.Status, outer.Error.RetryAfter = resp.StatusCode, resp.Header.Get("Retry-After")
	return outer.Error
}

// answer is a chunk or a whole answer of either API.
type answer struct {
	Choices []struct {
		Text         string
		Delta        struct{ Content string }
		Message      struct{ Content string }
		FinishReason string `json:"finish_reason"`
	}
	Usage *api.Usage
	Error *StatusError
}

func (r *Result) take(a answer, onText func(string)) {
	text := ""
	for _, c := range a.Choices {
		text += c.Text + c.Delta.Content + c.Message.Content
		if c.FinishReason != "" {
			r.FinishReason = c.FinishReason
		}
	}
	if a.Usage != nil {
		r.Usage = a.Usage
	}
	if text == "" {
		return
	}
	r.Chunks = append(r.Chunks, time.Now())
	r.Text += text
	if onText != nil {
		onText(text)
	}
}

func (r *Result) readWhole(body io.Reader, onText func(string)) error {
	b, err := io.ReadAll(io.LimitReader(body, maxBody))
	if err != nil {
		return fmt.Errorf("read answer: %w", err)
	}
	var a answer
	if err := json.Unmarshal(b, &a); err != nil {
		return fmt.Errorf("parse answer: %w", err)
	}
	if a.Error != nil {
		return a.Error
	}
	r.take(a, onText)
	return nil
}

func (r *Result) readStream(body io.Reader, onText func(string)) error {
	events := sse.NewReader(body, maxBody)
	for {
		ev, err := events.Next()
		if errors.Is(err, io.EOF) {
			return ErrNoEnd
		}
		if err != nil {
			return fmt.Errorf("read stream: %w", err)
		}
		if ev.Done() {
			return nil
		}
		var a answer
		if err := json.Unmarshal(ev.Data, &a); err != nil {
			return fmt.Errorf("parse event %.80q: %w", ev.Data, err)
		}
		if a.Error != nil {
			return a.Error
		}
		r.take(a, onText)
	}
}

// Get reads path as JSON into v.
func (c *Client) Get(ctx context.Context, path string, v any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+path, nil)
	if err != nil {
		return err
	}
	return c.exchange(req, v)
}

// Post sends body as JSON to path and reads the answer as JSON into v.
func (c *Client) Post(ctx context.Context, path string, body, v any) error {
	b, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("encode what is for %s: %w", path, err)
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.base+path, bytes.NewReader(b))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	return c.exchange(req, v)
}

func (c *Client) exchange(req *http.Request, v any) error {
	resp, err := c.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return readError(resp)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxBody)).Decode(v); err != nil {
		return fmt.Errorf("parse answer of %s: %w", req.URL.Path, err)
	}
	return nil
}
