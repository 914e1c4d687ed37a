package sse

import "bytes"

// ContentType is the media type of a stream.
const ContentType = "text/event-stream"

// AppendEvent appends data as one event; line ends inside data become further data lines.
func AppendEvent(dst, data []byte) []byte {
	dst = Begin(dst)
	return End(append(dst, data...), len(dst))
}

// Begin begins an event, whose data is to be appended.
func Begin(dst []byte) []byte { return append(dst, dataField...) }

// End ends an event whose data is dst[from:].
func End(dst []byte, from int) []byte {
	data := dst[from:]
	if bytes.IndexByte(data, '\n') < 0 && bytes.IndexByte(data, '\r') < 0 {
		return append(dst, '\n', '\n')
	}
	data = bytes.ReplaceAll(data, []byte("\r\n"), []byte("\n"))
	data = bytes.ReplaceAll(data, []byte("\r"), []byte("\n"))
	dst = dst[:from]
	for i, line := range bytes.Split(data, []byte("\n")) {
		if i > 0 {
			dst = append(dst, dataField...)
		}
		dst = append(append(dst, line...), '\n')
	}
	return append(dst, '\n')
}

// AppendDone appends OpenAI's end mark.
func AppendDone(dst []byte) []byte { return append(dst, "data: [DONE]\n\n"...) }
