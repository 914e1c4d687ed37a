package jsonl

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"

	"github.com/klauspost/compress/zstd"
)

// Packed is the ending that a compressed file has beyond its name.
const Packed = ".zst"

// frameBytes is how much text goes into one frame: the price of reading one line of a compressed file.
const frameBytes = 1 << 20

// Frame is a part of a compressed file that can be read by itself. It begins with a line.
type Frame struct {
	Plain  int64 // offset in the text
	Packed int64 // offset in the file
}

// Compress puts a file of lines that nobody writes any more into path + Packed and removes it. The new file appears when
// it is whole. Its frames hold whole lines.
func Compress(path string) (frames []Frame, err error) {
	in, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("compress: %w", err)
	}
	defer in.Close()
	temporary := path + Packed + ".tmp"
	out, err := os.Create(temporary)
	if err != nil {
		return nil, fmt.Errorf("compress %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			out.Close()
			os.Remove(temporary)
		}
	}()
	if frames, err = pack(in, out); err != nil {
		return nil, fmt.Errorf("compress %s: %w", path, err)
	}
	if err = out.Close(); err != nil {
		return nil, fmt.Errorf("compress %s: %w", path, err)
	}
	if info, e := os.Stat(path); e == nil { // the order of files by age stays
		_ = os.Chtimes(temporary, info.ModTime(), info.ModTime())
	}
	if err = os.Rename(temporary, path+Packed); err != nil {
		return nil, fmt.Errorf("compress %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil {
		return frames, fmt.Errorf("remove what is compressed now: %w", err)
	}
	return frames, nil
}

func pack(in io.Reader, out io.Writer) (frames []Frame, err error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return nil, err
	}
	defer enc.Close()
	r := bufio.NewReaderSize(in, frameBytes)
	var text, packed []byte
	var at Frame
	for more := true; more; {
		part, err := r.ReadSlice('\n')
		text = append(text, part...)
		if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
			if err != io.EOF {
				return nil, err
			}
			more = false
		}
		if whole := bytes.HasSuffix(text, []byte{'\n'}); (len(text) < frameBytes || !whole) && more || len(text) == 0 {
			continue
		}
		packed = enc.EncodeAll(text, packed[:0])
		if _, err := out.Write(packed); err != nil {
			return nil, err
		}
		frames = append(frames, at)
		at.Plain, at.Packed = at.Plain+int64(len(text)), at.Packed+int64(len(packed))
		text = text[:0]
	}
	return frames, nil
}

// unpack reads a compressed stream. Memory is bounded whatever its header says.
func unpack(r io.Reader) (io.ReadCloser, error) {
	d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(256<<20), zstd.WithDecoderMaxWindow(64<<20))
	if err != nil {
		return nil, err
	}
	return d.IOReadCloser(), nil
}

// LineAt reads the line that begins at an offset of a file's text. frames are those of a compressed file; without them it
// is read from its beginning.
func LineAt(path string, frames []Frame, offset int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open file of lines: %w", err)
	}
	defer f.Close()
	var from Frame
	if i := sort.Search(len(frames), func(i int) bool { return frames[i].Plain > offset }); i > 0 {
		from = frames[i-1]
	}
	if !isPacked(path) {
		from = Frame{Plain: offset, Packed: offset}
	}
	if _, err := f.Seek(from.Packed, io.SeekStart); err != nil {
		return nil, fmt.Errorf("read %s at %d: %w", path, from.Packed, err)
	}
	var text io.Reader = f
	if isPacked(path) {
		d, err := unpack(f)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		defer d.Close()
		text = d
	}
	r := bufio.NewReaderSize(text, 64<<10)
	if _, err := io.CopyN(io.Discard, r, offset-from.Plain); err != nil {
		return nil, fmt.Errorf("read %s at %d: %w", path, offset, err)
	}
	var long []byte
	line, _, err := readLine(r, &long)
	if err != nil {
		return nil, fmt.Errorf("read %s at %d: %w", path, offset, err)
	}
	return bytes.Clone(line), nil
}
