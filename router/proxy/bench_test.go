package proxy

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"meridian.internal/router/upstream"
	"meridian.internal/shared/node"
)

// rawNode answers every request with fixed bytes: it costs as little as a node can, so that the router is what is measured.
func rawNode(b *testing.B, answer []byte) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go answerAll(c, answer)
		}
	}()
	return "http://" + l.Addr().String()
}

func answerAll(c net.Conn, answer []byte) {
	defer c.Close()
	r := bufio.NewReader(c)
	for {
		length := 0
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			if line == "\r\n" {
				break
			}
			fmt.Sscanf(line, "Content-Length: %d", &length)
		}
		if _, err := r.Discard(length); err != nil {
			return
		}
		if _, err := c.Write(answer); err != nil {
			return
		}
	}
}

func chunked(parts ...string) []byte {
	var out strings.Builder
	out.WriteString("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
	for _, p := range parts {
		fmt.Fprintf(&out, "%x\r\n%s\r\n", len(p), p)
	}
	out.WriteString("0\r\n\r\n")
	return []byte(out.String())
}

// streamOf is a stream of n one-token chunks.
func streamOf(n int) []byte {
	var parts []string
	for i := range n {
		finish := "null"
		if i == n-1 {
			finish = `"length"`
		}
		parts = append(parts, fmt.Sprintf(`data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" w%d","logprobs":null,"finish_reason":%s,"token_ids":[%d]}]}`+"\n\n", i, finish, 1000+i))
	}
	return chunked(append(parts, `data: {"id":"cmpl-1","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":9,"total_tokens":11}}`+"\n\n", "data: [DONE]\n\n")...)
}

const ctxAnswer = `{"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3},"choices":[{"index":0,"text":"a","finish_reason":"length"}]}`

func BenchmarkRequest(b *testing.B) {
	for _, k := range []struct {
		name   string
		tokens int
		prompt int
	}{{"one token", 1, 2 << 10}, {"64 tokens", 64, 2 << 10}, {"one token, prompt of 64 KB", 1, 64 << 10}} {
		b.Run(k.name, func(b *testing.B) {
			c := newCluster(&testing.T{}, GenerationFirst)
			gen := rawNode(b, streamOf(k.tokens))
			ctx := rawNode(b, []byte(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(ctxAnswer), ctxAnswer)))
			for role, url := range map[node.Role]string{node.RoleCtx: ctx, node.RoleGen: gen} {
				c.pool.Put(node.Info{Name: string(role), Role: role, URL: url, KVAddr: "h:1", State: node.Ready, Seq: 1, Model: &node.Model{Name: "m", Hash: "h"}})
			}
			c.proxy.o.Tokenizers = nil
			body := []byte(`{"model":"m","prompt":"` + strings.Repeat("word ", k.prompt/5) + `","max_tokens":16,"stream":true}`)
			client := upstream.New(upstream.Options{})
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					res, err := client.Do(b.Context(), &upstream.Request{URL: c.url, Path: "/v1/completions", Body: [][]byte{body}})
					if err != nil || res.Status != http.StatusOK {
						b.Errorf("%v %v", res, err)
						return
					}
					io.Copy(io.Discard, res)
				}
			})
			c.mu.Lock()
			c.records = nil
			c.mu.Unlock()
		})
	}
}
