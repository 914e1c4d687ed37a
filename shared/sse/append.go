package sse

import "bytes"

// ContentType is the media type of a stream.
const ContentType = "text/event-stream"

// AppendEvent appends data as one event; line ends inside data become further data lines.
func AppendEvent(dst, data []byte) []byte {
	if bytes.IndexByte(data, '\n') < 0 && bytes.IndexByte(data, '\r') < 0 {
		dst = append(dst, "data: "...)
		dst = append(dst, data...)
		return append(dst, '\n', '\n')
	}
	data = bytes.ReplaceAll(data, []byte("\r\n"), []byte("\n"))
	data = bytes.ReplaceAll(data, []byte("\r"), []byte("\n"))
	for line := range bytes.SplitSeq(data, []byte("\n")) {
		dst = append(dst, "data: "...)
		dst = append(dst, line...)
		dst = append(dst, '\n')
	}
	return append(dst, '\n')
}

// AppendDone appends OpenAI's end mark.
func AppendDone(dst []byte) []byte { return append(dst, "data: [DONE]\n\n"...) }
