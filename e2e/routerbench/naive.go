package routerbench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync/atomic"
)

// naive is the plainest router for two legs: net/http on both sides, bodies as maps, a flush for each read.
type naive struct {
	ctx, gen string
	client   *http.Client
	ids      atomic.Int64
}

// Naive makes the unit of every ratio.
func Naive(ctxURL, genURL string) http.Handler {
	n := &naive{ctx: ctxURL, gen: genURL, client: &http.Client{Transport: manyConnections()}}
	n.ids.Store(1 << 40)
	return n
}

func manyConnections() *http.Transport {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.MaxIdleConns, t.MaxIdleConnsPerHost = 0, 1024
	return t
}

// ServeHTTP runs the context leg, then relays the generation leg.
func (n *naive) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := n.serve(w, r); err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
	}
}

func (n *naive) serve(w http.ResponseWriter, r *http.Request) error {
	var body map[string]any
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		return fmt.Errorf("decode body: %w", err)
	}
	params, err := n.prefill(r.Context(), r.URL.Path, body)
	if err != nil {
		return err
	}
	params["request_type"] = "generation_only"
	body["disaggregated_params"], body["stream"] = params, true
	res, err := n.post(r.Context(), n.gen+r.URL.Path, body)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	w.Header().Set("Content-Type", res.Header.Get("Content-Type"))
	w.WriteHeader(res.StatusCode)
	buf := make([]byte, 32<<10)
	for {
		m, err := res.Body.Read(buf)
		if m > 0 {
			if _, err := w.Write(buf[:m]); err != nil {
				return nil // the client has gone
			}
			w.(http.Flusher).Flush()
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			panic(http.ErrAbortHandler)
		}
	}
}

// prefill returns the disaggregated_params of the context worker.
func (n *naive) prefill(ctx context.Context, path string, body map[string]any) (map[string]any, error) {
	body["stream"] = false
	body["disaggregated_params"] = map[string]any{"request_type": "context_only", "disagg_request_id": n.ids.Add(1)}
	res, err := n.post(ctx, n.ctx+path, body)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	var answer struct {
		Choices []struct {
			Params map[string]any `json:"disaggregated_params"`
		} `json:"choices"`
	}
	if err := json.NewDecoder(res.Body).Decode(&answer); err != nil {
		return nil, fmt.Errorf("decode prefill answer: %w", err)
	}
	if len(answer.Choices) == 0 || answer.Choices[0].Params == nil {
		return nil, fmt.Errorf("prefill answered without disaggregated_params")
	}
	return answer.Choices[0].Params, nil
}

func (n *naive) post(ctx context.Context, url string, body map[string]any) (*http.Response, error) {
	b, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := n.client.Do(req)
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		defer res.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(res.Body, 4<<10))
		return nil, fmt.Errorf("%s answered %d: %s", url, res.StatusCode, text)
	}
	return res, nil
}

// ReverseProxy makes one hop of the standard library's proxy to the generation worker. It reads the body first: a worker
// that answers while the proxy still copies it would break the stream (golang/go#40747).
func ReverseProxy(genURL string) (http.Handler, error) {
	u, err := url.Parse(genURL)
	if err != nil {
		return nil, fmt.Errorf("--gen %q: %w", genURL, err)
	}
	p := httputil.NewSingleHostReverseProxy(u)
	p.Transport = manyConnections()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		r.Body = io.NopCloser(bytes.NewReader(body))
		p.ServeHTTP(w, r)
	}), nil
}
