package kvwire

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"meridian.internal/gpu/backend"
)

var update = flag.Bool("update", false, "write the golden files")

func sample() (Header, []byte) {
	return Header{
		Type: TypeKV, Flags: 0x0102, Request: 0x1122334455667788, Epoch: 0xa1a2a3a4a5a6a7a8,
		LayerFrom: 3, LayerTo: 5, HeadFrom: 7, HeadTo: 11, TokenFrom: 13, TokenTo: 0x01020304,
	}, []byte("seventeen bytes..")
}

func TestAFrameSurvivesTheWireWithEveryFieldDifferent(t *testing.T) {
	want, payload := sample()
	raw := append(AppendHeader(nil, want, payload), payload...)
	got, body, err := readFrame(bytes.NewReader(raw), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	want.Length, want.sum, want.begun = uint32(len(payload)), got.sum, got.begun
	if got != want || !bytes.Equal(body, payload) {
		t.Errorf("got %+v %q, want %+v %q", got, body, want, payload)
	}
}

func TestTheBytesOfAFrameAreTheGoldenOnes(t *testing.T) {
	h, payload := sample()
	got := hex.Dump(append(AppendHeader(nil, h, payload), payload...))
	path := filepath.Join("testdata", "frame.golden")
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}

func TestBadFramesAreRefusedBeforeTheirPayloadIsRead(t *testing.T) {
	h, payload := sample()
	good := append(AppendHeader(nil, h, payload), payload...)
	for _, c := range []struct {
		name string
		edit func(b []byte) []byte
		want string
	}{
		{"a foreign magic", func(b []byte) []byte { b[0] ^= 1; return b }, "magic"},
		{"a later version", func(b []byte) []byte { b[4] = 2; return b }, "version 2"},
		{"an unknown type", func(b []byte) []byte { b[5] = 99; return b }, "type 99"},
		{"a length beyond the limit", func(b []byte) []byte { b[11] = 0x7f; return b }, "payload of"},
		{"a control frame as long as a KV frame", func(b []byte) []byte { b[5] = byte(TypePing); b[10] = 0x10; return b }, "payload of"},
		{"a flipped bit in the payload", func(b []byte) []byte { b[HeaderSize] ^= 4; return b }, "checksum"},
		{"a flipped bit in the token range", func(b []byte) []byte { b[41] ^= 4; return b }, "checksum"},
	} {
		_, _, err := readFrame(bytes.NewReader(c.edit(bytes.Clone(good))), nil, nil)
		if !errors.Is(err, ErrFrame) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want a bad frame that says %q", c.name, err, c.want)
		}
	}
	for n := range good {
		_, _, err := readFrame(bytes.NewReader(good[:n]), nil, nil)
		want := io.ErrUnexpectedEOF
		if n == 0 {
			want = io.EOF
		}
		if !errors.Is(err, want) {
			t.Errorf("the first %d bytes: got %v, want %v", n, err, want)
		}
	}
}

func FuzzReadFrame(f *testing.F) {
	h, payload := sample()
	f.Add(append(AppendHeader(nil, h, payload), payload...))
	f.Add(AppendHeader(nil, Header{Type: TypePing}, nil))
	f.Fuzz(func(t *testing.T, raw []byte) {
		h, payload, err := readFrame(bytes.NewReader(raw), nil, nil)
		if err != nil {
			if !errors.Is(err, ErrFrame) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Fatalf("undocumented error %v", err)
			}
			return
		}
		if again := append(AppendHeader(nil, h, payload), payload...); !bytes.Equal(again, raw[:len(again)]) {
			t.Fatalf("round trip changed %x to %x", raw, again)
		}
	})
}

func FuzzParseTrailer(f *testing.F) {
	f.Add([]byte(`{"first":[{"id":1,"logprob":-0.5,"top":[{"id":2,"logprob":-1}]}],"finish_reason":"length","prompt_tokens":3}`))
	f.Add([]byte(`{`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if _, err := parseJSON[Trailer](TypeTrailer, raw); err != nil && !errors.Is(err, ErrFrame) {
			t.Fatalf("undocumented error %v", err)
		}
		if _, err := parseJSON[backend.Shared](TypeShared, raw); err != nil && !errors.Is(err, ErrFrame) {
			t.Fatalf("undocumented error %v", err)
		}
		if _, err := parseJSON[Hello](TypeHello, raw); err != nil && !errors.Is(err, ErrFrame) {
			t.Fatalf("undocumented error %v", err)
		}
	})
}
