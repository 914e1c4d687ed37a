package collect

import (
	"cmp"
	"os"
	"slices"
	"strings"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/timeline"
)

// rememberBytes is how much of the newest files is read at the start. It covers every line whose acknowledgements may
// have been lost when the last process died: those of one flush, and of what other routers wrote meanwhile.
const rememberBytes = 64 << 20

// remember reads the newest lines, so that redelivered records find them written. An amendment is newer than its line, whichever
// file was written last.
func (c *Collector) remember() error {
	for _, suffix := range []string{".jsonl", ".amend.ndjson"} {
		if err := c.rememberFiles(suffix); err != nil {
			return err
		}
	}
	return nil
}

// rememberFiles reads the newest files of a kind, the oldest of them first.
func (c *Collector) rememberFiles(suffix string) error {
	type file struct {
		path string
		size int64
		mod  int64
	}
	names, err := jsonl.Files(c.o.Dir, filePrefix, suffix)
	if err != nil {
		return err
	}
	var files []file
	for _, n := range names {
		if info, err := os.Stat(n); err == nil {
			files = append(files, file{n, info.Size(), info.ModTime().UnixNano()})
		}
	}
	slices.SortFunc(files, func(a, b file) int { return cmp.Compare(b.mod, a.mod) })
	total := int64(0)
	keep := 0
	for keep < len(files) && total < rememberBytes {
		total += files[keep].size
		keep++
	}
	for _, f := range slices.Backward(files[:keep]) {
		from := max(0, f.size-rememberBytes)
		if strings.HasSuffix(f.path, jsonl.Packed) {
			from = 0 // the size of its text is not known
		}
		c.rememberFile(f.path, from)
	}
	return nil
}

func (c *Collector) rememberFile(path string, from int64) {
	err := jsonl.Read(path, func(b []byte, _ int, offset int64) error {
		if offset < from {
			return nil
		}
		l, err := timeline.Parse(b)
		if err != nil {
			return nil // bin/timeline check reports it; here it is no line of ours
		}
		c.written.remembered(l)
		c.recent.add(l, b, jsonl.Location{Path: path, Offset: offset, Len: len(b)})
		return nil
	}, func(int, error) {})
	if err != nil {
		c.log.Warn("older timelines cannot be read", "file", path, "error", err)
	}
}
