package api

import (
	"strconv"
	"unicode/utf8"

	"meridian.internal/shared/jsonline"
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
	w.dst = jsonline.AppendString(w.dst, string(key))
	w.dst = append(w.dst, ':')
}

func (w *writer) member(key, value []byte) {
	w.key(key)
	if w.on {
		w.dst = append(w.dst, value...)
	}
}

// walkChunk appends to dst what it rewrites; nothing after an error.
func walkChunk(c *Chunk, dst, data []byte, chat bool, rw *Rewrite) ([]byte, error) {
	s := &scanner{b: data}
	w := &writer{dst: dst, on: rw != nil}
	w.open('{')
	for more := s.enter('{'); more; more = s.more('{') {
		switch key := s.key(); string(key) {
		case "id":
			w.member(key, rw.id(s.take()))
		case "model":
			w.member(key, rw.model(s.take()))
		case "created":
			w.member(key, rw.created(s.take()))
		case "choices":
			w.key(key)
			walkChoices(w, c, s, chat, rw)
		case "usage":
			v := s.take()
			c.Usage = notNull(v)
			if rw != nil && rw.KeepUsage {
				w.member(key, v)
			}
		case "error":
			if !isNull(s.take()) {
				c.Error = data
			}
		case "prompt_token_ids":
			s.skip()
		default:
			w.member(key, s.take())
		}
	}
	w.close('}')
	s.end()
	if s.err == nil && !s.ascii() && !utf8.Valid(data) {
		s.err = errUTF8
	}
	if s.err != nil {
		return dst, s.err
	}
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

func walkChoices(w *writer, c *Chunk, s *scanner, chat bool, rw *Rewrite) {
	if s.null() {
		w.dst = appendIf(w.on, w.dst, "[]")
		return
	}
	w.open('[')
	for more := s.enter('['); more; more = s.more('[') {
		if c.Choices > 0 {
			w.dst = appendIf(w.on, w.dst, ",")
		}
		c.Choices++
		walkChoice(w, c, s, chat, rw)
	}
	w.close(']')
}

func appendIf(on bool, dst []byte, s string) []byte {
	if on {
		return append(dst, s...)
	}
	return dst
}

func walkChoice(w *writer, c *Chunk, s *scanner, chat bool, rw *Rewrite) {
	w.open('{')
	for more := s.enter('{'); more; more = s.more('{') {
		key := s.key()
		var v []byte
		if chat && string(key) == "delta" {
			v = s.delta(c)
		} else {
			v = s.take()
		}
		switch string(key) {
		case "index":
			w.key(key)
			if w.on {
				w.dst = strconv.AppendInt(w.dst, int64(rw.Index), 10)
			}
			continue
		case "token_ids":
			c.TokenIDs = notNull(v)
			continue
		case "disaggregated_params", "avg_decoded_tokens_per_iter":
			continue
		case "text":
			c.Text = stringInside(v)
		case "finish_reason":
			c.Finish = s.text(key, v)
		case "stop_reason":
			c.StopReason = notNull(v)
		case "logprobs":
			c.Logprobs = notNull(v)
		}
		w.member(key, v)
		if c.Text != nil && (string(key) == "text" || string(key) == "delta") {
			c.out = len(w.dst) - len(v) + offset(v, c.Text)
		}
	}
	w.close('}')
}

// offset is where part, a slice of all, begins in it.
func offset(all, part []byte) int { return cap(all) - cap(part) }

// delta walks over the delta of a chat choice and returns it; nil after an error.
func (s *scanner) delta(c *Chunk) []byte {
	s.space()
	from, says := s.i, false
	for more := s.enter('{'); more; more = s.more('{') {
		switch key := s.key(); string(key) {
		case "content":
			c.Text = stringInside(s.take())
		case "role":
			s.skip()
		default:
			v := s.take()
			says = says || !isNull(v) && string(v) != "[]" && string(v) != `""`
		}
	}
	if s.err != nil {
		return nil
	}
	all := s.b[from:s.i]
	if says {
		c.Delta = all
	}
	return all
}

// stringInside returns what is between the quotes; nil when v is no string.
func stringInside(v []byte) []byte {
	if len(v) < 2 || v[0] != '"' {
		return nil
	}
	return v[1 : len(v)-1]
}
