package sse

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

func readAll(r *Reader) ([]string, error) {
	var out []string
	for {
		ev, err := r.Next()
		if err != nil {
			return out, err
		}
		out = append(out, string(ev.Name)+"|"+string(ev.Data))
	}
}

func TestReader(t *testing.T) {
	cases := []struct {
		name string
		in   string
		want []string
		err  error
	}{
		{"one event", "data: a\n\n", []string{"|a"}, io.EOF},
		{"two events and the end mark", "data: a\n\ndata: b\n\ndata: [DONE]\n\n", []string{"|a", "|b", "|[DONE]"}, io.EOF},
		{"CRLF line ends", "data: a\r\n\r\ndata: b\r\n\r\n", []string{"|a", "|b"}, io.EOF},
		{"CR line ends", "data: a\r\rdata: b\r\r", []string{"|a", "|b"}, io.EOF},
		{"several data lines are joined", "data: a\ndata: b\n\n", []string{"|a\nb"}, io.EOF},
		{"no space after the colon", "data:a\n\n", []string{"|a"}, io.EOF},
		{"only one space is dropped", "data:  a\n\n", []string{"| a"}, io.EOF},
		{"comments and unknown fields are skipped", ": ping\n\nid: 7\nretry: 1\ndata: a\n\n", []string{"|a"}, io.EOF},
		{"an event without data is no event", "event: x\n\ndata: a\n\n", []string{"|a"}, io.EOF},
		{"an event has a name", "event: err\ndata: a\n\ndata: b\n\n", []string{"err|a", "|b"}, io.EOF},
		{"a byte order mark is dropped", "\xef\xbb\xbfdata: a\n\n", []string{"|a"}, io.EOF},
		{"the stream breaks inside a line", "data: a\n\ndata: b", []string{"|a"}, io.ErrUnexpectedEOF},
		{"the stream breaks between lines of an event", "data: a\n", nil, io.ErrUnexpectedEOF},
		{"empty data is an event", "data\n\n", []string{"|"}, io.EOF},
		{"nothing at all", "", nil, io.EOF},
	}
	for _, c := range cases {
		for how, wrap := range map[string]func(io.Reader) io.Reader{
			"whole": func(r io.Reader) io.Reader { return r }, "byte by byte": iotest.OneByteReader,
			"error with data": iotest.DataErrReader,
		} {
			t.Run(c.name+"/"+how, func(t *testing.T) {
				got, err := readAll(NewReader(wrap(strings.NewReader(c.in)), 0))
				if !slices.Equal(got, c.want) || !errors.Is(err, c.err) {
					t.Errorf("got %q, %v; want %q, %v", got, err, c.want, c.err)
				}
			})
		}
	}
}

func TestReaderBoundsAnEvent(t *testing.T) {
	for _, in := range []string{
		"data: " + strings.Repeat("x", 100_000),
		strings.Repeat("data: xxxxxxxx\n", 10_000),
	} {
		if _, err := readAll(NewReader(strings.NewReader(in), 10_000)); !errors.Is(err, ErrTooLong) {
			t.Errorf("%.20q...: got %v, want ErrTooLong", in, err)
		}
	}
}

func TestReaderPassesLongEvents(t *testing.T) {
	long := strings.Repeat("x", 300_000)
	got, err := readAll(NewReader(strings.NewReader("data: "+long+"\n\ndata: b\n\n"), 0))
	if len(got) != 2 || got[0] != "|"+long || !errors.Is(err, io.EOF) {
		t.Errorf("got %d events, %v", len(got), err)
	}
}

func TestSplitterTakesPieces(t *testing.T) {
	const in = "data: a\n\ndata: b\n\n: ping\n\ndata: c\ndata: d\n\nda"
	var s Splitter
	rest := []byte(in)
	var got []string
	for {
		ev, left, ok, err := s.Next(rest)
		if err != nil {
			t.Fatal(err)
		}
		if rest = left; !ok {
			break
		}
		got = append(got, string(ev.Data))
	}
	if !slices.Equal(got, []string{"a", "b", "c\nd"}) || len(rest) != 0 || !s.Within() {
		t.Errorf("got %q, %q is left, within an event: %t", got, rest, s.Within())
	}
	if ev, _, ok, err := s.Next([]byte("ta: e\n\n")); !ok || err != nil || string(ev.Data) != "e" || s.Within() {
		t.Errorf("got %q, %t, %v", ev.Data, ok, err)
	}
}

func FuzzReader(f *testing.F) {
	f.Add([]byte("data: a\n\n: c\r\n\r\nevent: x\ndata: b\rdata: c\r\r"), 1)
	f.Add([]byte("\xef\xbb\xbfdata:\n\ndata: [DONE]\n\n"), 3)
	f.Fuzz(func(t *testing.T, in []byte, step int) {
		step = max(1, step%64)
		whole, werr := readAll(NewReader(bytes.NewReader(in), 1<<16))
		parts, perr := readAll(NewReader(&stepReader{b: in, n: step}, 1<<16))
		if !slices.Equal(whole, parts) || fmt.Sprint(werr) != fmt.Sprint(perr) {
			t.Errorf("whole: %q %v; in steps of %d: %q %v", whole, werr, step, parts, perr)
		}
		if !errors.Is(werr, io.EOF) && !errors.Is(werr, io.ErrUnexpectedEOF) && !errors.Is(werr, ErrTooLong) {
			t.Errorf("undocumented error %v", werr)
		}
		var again []byte
		for _, s := range whole {
			_, data, _ := strings.Cut(s, "|")
			again = AppendEvent(again, []byte(data))
		}
		got, _ := readAll(NewReader(bytes.NewReader(again), 1<<17))
		if len(got) != len(whole) {
			t.Errorf("round trip: %d events became %d", len(whole), len(got))
		}
	})
}

type stepReader struct {
	b []byte
	n int
}

func (s *stepReader) Read(p []byte) (int, error) {
	if len(s.b) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), s.n)], s.b)
	s.b = s.b[n:]
	return n, nil
}

func TestAppendEvent(t *testing.T) {
	got := string(AppendDone(AppendEvent(AppendEvent(nil, []byte(`{"a":1}`)), []byte("x\r\ny\nz"))))
	want := "data: {\"a\":1}\n\ndata: x\ndata: y\ndata: z\n\ndata: [DONE]\n\n"
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func BenchmarkReader(b *testing.B) {
	chunk := []byte(`data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" x"}]}` + "\n\n")
	in := bytes.Repeat(chunk, 64)
	b.SetBytes(int64(len(in)))
	b.ReportAllocs()
	for b.Loop() {
		r := NewReader(bytes.NewReader(in), 0)
		for {
			if _, err := r.Next(); err != nil {
				break
			}
		}
	}
}
