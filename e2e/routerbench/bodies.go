package routerbench

import (
	"bytes"
	"fmt"
	"strconv"
	"strings"
)

const (
	modelName = "mock"
	// opaqueState stands for the address of the KV blocks: a generation leg must bring back what the context leg said.
	opaqueState = "TWVyaWRpYW4gbW9jayBvcGFxdWUgc3RhdGUgb2YgYSBjb250ZXh0IHdvcmtlcg=="
	// promptIDs are what the mock says that a prompt has, whatever its length.
	promptIDs = "[[11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26]]"
)

// number finds the first member of that name anywhere in body; 0 where there is none.
func number(body []byte, name string) int64 {
	key := []byte(`"` + name + `":`)
	i := bytes.Index(body, key)
	if i < 0 {
		return 0
	}
	rest := bytes.TrimLeft(body[i+len(key):], " ")
	n := 0
	for n < len(rest) && rest[n] >= '0' && rest[n] <= '9' {
		n++
	}
	v, err := strconv.ParseInt(string(rest[:n]), 10, 64)
	if err != nil {
		return 0
	}
	return v
}

// appendCtxAnswer appends the answer of a context leg.
func appendCtxAnswer(dst []byte, disaggID int64) []byte {
	return fmt.Appendf(dst, `{"id":"cmpl-mock","object":"text_completion","created":1,"model":"%s","prompt_token_ids":%s,`+
		`"choices":[{"index":0,"text":"w0","logprobs":null,"finish_reason":"length","stop_reason":null,"disaggregated_params":`+
		`{"request_type":"context_only","first_gen_tokens":[100],"ctx_request_id":%d,"disagg_request_id":%d,"encoded_opaque_state":"%s","ctx_dp_rank":0}}],`+
		`"usage":{"prompt_tokens":16,"completion_tokens":1,"total_tokens":17}}`, modelName, promptIDs, disaggID, disaggID, opaqueState)
}

// appendChunk appends data as one chunk of the transfer encoding.
func appendChunk(dst []byte, data ...[]byte) []byte {
	n := 0
	for _, d := range data {
		n += len(d)
	}
	dst = append(strconv.AppendInt(dst, int64(n), 16), "\r\n"...)
	for _, d := range data {
		dst = append(dst, d...)
	}
	return append(dst, "\r\n"...)
}

const (
	tokenOpen   = `data: {"id":"cmpl-mock","object":"text_completion","created":1,"model":"mock","choices":[{"index":0,"text":"w`
	tokenGoesOn = `","logprobs":null,"finish_reason":null,"stop_reason":null}],"usage":null}` + "\n\n"
	tokenEnds   = `","logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":null}` + "\n\n"
)

// appendToken appends the event of token i. Its text is "w<i>.<ns>": the time at which it was sent.
func appendToken(dst []byte, i int, last bool, ns int64) []byte {
	var text [48]byte
	t := strconv.AppendInt(text[:0], int64(i), 10)
	t = strconv.AppendInt(append(t, '.'), ns, 10)
	end := tokenGoesOn
	if last {
		end = tokenEnds
	}
	return appendChunk(dst, []byte(tokenOpen), t, []byte(end))
}

// appendEnd appends what follows the last token.
func appendEnd(dst []byte, tokens int, usage bool) []byte {
	if usage {
		dst = appendChunk(dst, fmt.Appendf(nil, `data: {"id":"cmpl-mock","object":"text_completion","created":1,"model":"mock","choices":[],"usage":`+
			`{"prompt_tokens":16,"completion_tokens":%d,"total_tokens":%d}}`+"\n\n", tokens, 16+tokens))
	}
	return append(appendChunk(dst, []byte("data: [DONE]\n\n")), "0\r\n\r\n"...)
}

// request is a whole HTTP request of a client, or of a leg when disagg is not empty.
func request(host string, promptBytes, tokens int, disagg string) []byte {
	body := fmt.Sprintf(`{"model":"%s","prompt":"%s","max_tokens":%d,"temperature":0,"stream":%t%s}`,
		modelName, strings.Repeat("lorem ", promptBytes/6+1)[:promptBytes], tokens, disagg != ctxParams, disagg)
	return fmt.Appendf(nil, "POST /v1/completions HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", host, len(body), body)
}

const (
	ctxParams = `,"disaggregated_params":{"request_type":"context_only","disagg_request_id":1099511627777}`
	genParams = `,"disaggregated_params":{"request_type":"generation_only","ctx_request_id":1099511627777,"disagg_request_id":1099511627777,"encoded_opaque_state":"` + opaqueState + `"}`
)
