package export

import (
	"bufio"
	"hash/fnv"
	"strconv"
	"strings"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/jsonline"
	"meridian.internal/shared/rows"
)

// chrome writes Chrome's trace-event format, which ui.perfetto.dev and chrome://tracing open.
type chrome struct {
	w     *bufio.Writer
	y     layout
	pids  map[string]int64
	tids  map[[2]string]int64
	first bool
	buf   []byte
}

func newChrome(w *bufio.Writer) *chrome {
	return &chrome{w: w, pids: map[string]int64{}, tids: map[[2]string]int64{}, first: true}
}

// event starts an event; the caller closes it.
func (c *chrome) event(kind, name string, pid, tid int64) *jsonline.Writer {
	c.buf = c.buf[:0]
	if c.first {
		c.buf = append(c.buf, `{"displayTimeUnit":"ns","traceEvents":[`+"\n"...)
		c.first = false
	} else {
		c.buf = append(c.buf, ",\n"...)
	}
	w := &jsonline.Writer{B: c.buf}
	w.Open('{')
	w.Str("ph", kind)
	w.Str("name", name)
	w.Int("pid", pid)
	w.Int("tid", tid)
	return w
}

func (c *chrome) end(w *jsonline.Writer) error {
	w.Close('}')
	c.buf = w.B
	_, err := c.w.Write(w.B)
	return err
}

// micros writes ns as microseconds with three decimals: floats would lose nanoseconds of UTC.
func micros(w *jsonline.Writer, key string, ns int64) {
	w.Key(key)
	w.B = appendFixed(w.B, ns, 3)
}

// appendFixed writes v / 10^digits with all its digits.
func appendFixed(b []byte, v int64, digits int) []byte {
	u := uint64(v)
	if v < 0 {
		b, u = append(b, '-'), -u // the least of all has no opposite
	}
	pow := uint64(1)
	for range digits {
		pow *= 10
	}
	b = append(strconv.AppendUint(b, u/pow, 10), '.')
	for p := pow / 10; p > 0; p /= 10 {
		b = append(b, byte('0'+u/p%10))
	}
	return b
}

func (c *chrome) process(name string) (pid int64, err error) {
	pid, ok := c.pids[name]
	if !ok {
		pid = int64(len(c.pids) + 1)
		c.pids[strings.Clone(name)] = pid // a key must not keep the text of its line
		err = c.meta("process_name", name, pid, 0)
	}
	return pid, err
}

func (c *chrome) track(process, track string) (pid, tid int64, err error) {
	pid, err = c.process(process)
	k := [2]string{process, track}
	tid, ok := c.tids[k]
	if !ok && err == nil {
		tid = int64(len(c.tids) + 1)
		c.tids[[2]string{strings.Clone(process), strings.Clone(track)}] = tid
		err = c.meta("thread_name", track, pid, tid)
	}
	return pid, tid, err
}

func (c *chrome) meta(kind, name string, pid, tid int64) error {
	w := c.event("M", kind, pid, tid)
	w.OpenKey("args", '{')
	w.Str("name", name)
	w.Close('}')
	return c.end(w)
}

// Line adds a request.
func (c *chrome) Line(l *timeline.Line) error {
	var before *slice
	for _, s := range c.y.slices(l) {
		if s.flow && before != nil {
			if err := c.arrow(before, &s, l.RequestID); err != nil {
				return err
			}
		}
		if err := c.slice(&s); err != nil {
			return err
		}
		before = &s
	}
	return c.count(c.y.counters)
}

// Row adds what a row counts.
func (c *chrome) Row(s *rows.Static, r *rows.Row) error { return c.count(c.y.row(s, r)) }

// Window adds a profile window.
func (c *chrome) Window(w *Window) error {
	list, err := c.y.window(w)
	for i := 0; err == nil && i < len(list); i++ {
		err = c.slice(&list[i])
	}
	return err
}

func (c *chrome) count(list []counter) error {
	for _, n := range list {
		pid, err := c.process(n.process)
		if err != nil {
			return err
		}
		w := c.event("C", n.track, pid, 0)
		micros(w, "ts", n.at)
		w.OpenKey("args", '{')
		w.Int("value", n.value)
		w.Close('}')
		if err := c.end(w); err != nil {
			return err
		}
	}
	return nil
}

func (c *chrome) slice(s *slice) error {
	pid, tid, err := c.track(s.process, s.track)
	if err != nil {
		return err
	}
	w := c.event("X", s.name, pid, tid)
	micros(w, "ts", s.start)
	micros(w, "dur", s.dur)
	w.OpenKey("args", '{')
	w.OptInt("bound_ns", s.bound)
	for _, a := range s.args {
		if a.text != "" {
			w.Str(a.key, a.text)
		} else {
			w.Int(a.key, a.num)
		}
	}
	w.Close('}')
	return c.end(w)
}

// arrow leads from the end of a slice to the start of the next, on another process.
func (c *chrome) arrow(from, to *slice, id string) error {
	for _, x := range []struct {
		kind string
		s    *slice
		at   int64
	}{{"s", from, from.start}, {"f", to, to.start}} {
		pid, tid, err := c.track(x.s.process, x.s.track)
		if err != nil {
			return err
		}
		w := c.event(x.kind, "request", pid, tid)
		w.Str("cat", "flow")
		w.Int("id", int64(hash(id, from.name)&(1<<53-1))) // what a reader's float holds
		w.Str("bp", "e")
		micros(w, "ts", x.at)
		if err := c.end(w); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the file.
func (c *chrome) Close() error {
	end := "\n]}\n"
	if c.first {
		end = `{"displayTimeUnit":"ns","traceEvents":[` + end
	}
	if _, err := c.w.WriteString(end); err != nil {
		return err
	}
	return c.w.Flush()
}

// hash makes an id of texts.
func hash(parts ...string) uint64 {
	h := fnv.New64a()
	for _, p := range parts {
		h.Write([]byte(p))
		h.Write([]byte{0})
	}
	return h.Sum64()
}
