package api

import (
	"fmt"
	"strconv"
	"unicode/utf8"
)

// Chunk is what a router reads in one chunk object of a worker's stream. The byte slices alias the input.
type Chunk struct {
	Choices int // number of choices; our legs have one at most
	Text    []byte
	// Text is the inside of a JSON string, still escaped: pieces can be joined without decoding. Nil: no text.
	TokenIDs     []byte // JSON array as sent; nil if absent
	Delta        []byte // chat: the delta, when it says more than role and content (tool calls, reasoning); else nil
	Finish       string // "": not finished
	StopReason   []byte // nil if absent or null
	Logprobs     []byte // nil if absent or null
	Usage        []byte // nil if absent or null
	Error        []byte // the whole chunk, when it is an error event
	OnlyMetadata bool   // no choice and no usage: a worker's own event, not for clients

	out int // where Text is in a rewritten chunk
}

// Rewrite says how a chunk is changed on its way to the client.
type Rewrite struct {
	ID        []byte // JSON string
	Model     []byte // JSON string
	Created   []byte // JSON number; nil keeps the worker's
	Index     int
	KeepUsage bool
}

// ReadChunk reads one chunk of a leg. It validates all of data.
func ReadChunk(data []byte, chat bool) (Chunk, error) {
	var c Chunk
	_, err := walkChunk(&c, nil, data, chat, nil)
	return c, err
}

// RewriteChunk reads one chunk and appends it to dst with id, model and index replaced and the members that are no
// client's business removed (token_ids, disaggregated_params, usage unless kept). Unknown members are copied as sent.
func RewriteChunk(dst, data []byte, chat bool, rw *Rewrite) (Chunk, []byte, error) {
	var c Chunk
	dst, err := walkChunk(&c, dst, data, chat, rw)
	return c, dst, err
}

// writer appends the members of a rewritten object; with a nil Rewrite nothing is written.
type writer struct {
	dst   []byte
	on    bool
	first bool
}

func (w *writer) open(b byte) {
	if w.on {
		w.dst = append(w.dst, b)
		w.first = true
	}
}

func (w *writer) close(b byte) {
	if w.on {
		w.dst = append(w.dst, b)
		w.first = false
	}
}

func (w *writer) key(key []byte) {
	if !w.on {
		return
	}
	if !w.first {
		w.dst = append(w.dst, ',')
	}
	w.first = false
	w.dst = AppendString(w.dst, string(key))
	w.dst = append(w.dst, ':')
}

func (w *writer) member(key, value []byte) {
	w.key(key)
	if w.on {
		w.dst = append(w.dst, value...)
	}
}

func walkChunk(c *Chunk, dst, data []byte, chat bool, rw *Rewrite) ([]byte, error) {
	var arr [12]Field
	fields, ascii, err := splitObject(arr[:0], data)
	if err == nil && !ascii && !utf8.Valid(data) {
		err = errUTF8
	}
	if err != nil {
		return dst, err
	}
	w := &writer{dst: dst, on: rw != nil}
	w.open('{')
	for _, f := range fields {
		switch string(f.Key) {
		case "id":
			w.member(f.Key, rw.id(f.Value))
		case "model":
			w.member(f.Key, rw.model(f.Value))
		case "created":
			w.member(f.Key, rw.created(f.Value))
		case "choices":
			w.key(f.Key)
			if err := walkChoices(w, c, f.Value, chat, rw); err != nil {
				return w.dst, err
			}
		case "usage":
			c.Usage = notNull(f.Value)
			if rw != nil && rw.KeepUsage {
				w.member(f.Key, f.Value)
			}
		case "error":
			if !isNull(f.Value) {
				c.Error = data
			}
		case "prompt_token_ids":
		default:
			w.member(f.Key, f.Value)
		}
	}
	w.close('}')
	c.OnlyMetadata = c.Choices == 0 && c.Usage == nil && c.Error == nil
	return w.dst, nil
}

func (rw *Rewrite) id(v []byte) []byte {
	if rw == nil {
		return v
	}
	return rw.ID
}

func (rw *Rewrite) model(v []byte) []byte {
	if rw == nil {
		return v
	}
	return rw.Model
}

func (rw *Rewrite) created(v []byte) []byte {
	if rw == nil || rw.Created == nil {
		return v
	}
	return rw.Created
}

func notNull(v []byte) []byte {
	if isNull(v) {
		return nil
	}
	return v
}

func walkChoices(w *writer, c *Chunk, v []byte, chat bool, rw *Rewrite) error {
	if isNull(v) {
		w.dst = appendIf(w.on, w.dst, "[]")
		return nil
	}
	w.open('[')
	var bad error
	err := eachElement(v, func(elem []byte) bool {
		if c.Choices > 0 {
			w.dst = appendIf(w.on, w.dst, ",")
		}
		c.Choices++
		bad = walkChoice(w, c, elem, chat, rw)
		return bad == nil
	})
	w.close(']')
	if bad != nil {
		return bad
	}
	return err
}

func appendIf(on bool, dst []byte, s string) []byte {
	if on {
		return append(dst, s...)
	}
	return dst
}

func walkChoice(w *writer, c *Chunk, elem []byte, chat bool, rw *Rewrite) error {
	var arr [12]Field
	fields, err := SplitObject(arr[:0], elem)
	if err != nil {
		return err
	}
	w.open('{')
	for _, f := range fields {
		switch string(f.Key) {
		case "index":
			w.key(f.Key)
			if w.on {
				w.dst = strconv.AppendInt(w.dst, int64(rw.Index), 10)
			}
			continue
		case "token_ids":
			c.TokenIDs = notNull(f.Value)
			continue
		case "disaggregated_params", "avg_decoded_tokens_per_iter":
			continue
		case "text":
			c.Text = stringInside(f.Value)
		case "delta":
			if chat {
				if err := readDelta(c, f.Value); err != nil {
					return err
				}
			}
		case "finish_reason":
			if !isNull(f.Value) {
				if c.Finish, err = decodeString(f.Value); err != nil {
					return fmt.Errorf("finish_reason: want %w", err)
				}
			}
		case "stop_reason":
			c.StopReason = notNull(f.Value)
		case "logprobs":
			c.Logprobs = notNull(f.Value)
		}
		w.member(f.Key, f.Value)
		if key := string(f.Key); c.Text != nil && (key == "text" || key == "delta") {
			c.out = len(w.dst) - len(f.Value) + offset(f.Value, c.Text)
		}
	}
	w.close('}')
	return nil
}

// offset is where part, a slice of all, begins in it.
func offset(all, part []byte) int { return cap(all) - cap(part) }

func readDelta(c *Chunk, v []byte) error {
	var arr [6]Field
	fields, err := SplitObject(arr[:0], v)
	if err != nil {
		return err
	}
	for _, f := range fields {
		switch string(f.Key) {
		case "content":
			c.Text = stringInside(f.Value)
		case "role":
		default:
			if !isNull(f.Value) && string(f.Value) != "[]" && string(f.Value) != `""` {
				c.Delta = v
			}
		}
	}
	return nil
}

// stringInside returns what is between the quotes; nil when v is no string.
func stringInside(v []byte) []byte {
	if len(v) < 2 || v[0] != '"' {
		return nil
	}
	return v[1 : len(v)-1]
}
