package traces

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"meridian.internal/router/jsonl"
	"meridian.internal/shared/jsonline"
)

// Seal makes a file of lines that nobody writes any more quick to search: it writes the index beside it and, if asked to,
// compresses it. It does only what is not done yet, and nothing to a file that a process writes or seals.
func Seal(path string, compress bool) error {
	lock, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil // compressed by another process
	}
	if err != nil {
		return fmt.Errorf("seal: %w", err)
	}
	defer lock.Close()
	if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) != nil {
		return nil
	}
	if info, err := lock.Stat(); err != nil || info.Size() == 0 {
		return err // empty: its writer has made it and is about to lock it
	}
	if err := indexed(path); err == nil && (!compress || strings.HasSuffix(path, jsonl.Packed)) {
		return nil
	}
	entries, covers, err := scan(path)
	if err != nil {
		return err
	}
	var frames []jsonl.Frame
	if compress && !strings.HasSuffix(path, jsonl.Packed) {
		if frames, err = jsonl.Compress(path); err != nil {
			return err
		}
		os.Remove(path + IndexSuffix) // of the file that is gone; a crash before leaves it to SealRest
		path += jsonl.Packed
	}
	return replaceFile(path+IndexSuffix, appendIndex(nil, covers, frames, entries))
}

// indexed says whether the index of a file is whole and covers it.
func indexed(path string) error {
	x, f, err := openIndex(path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if err := x.verify(info.Size()); err != nil {
		return err
	}
	if text, err := os.Stat(path); err != nil || (!strings.HasSuffix(path, jsonl.Packed) && text.Size() != x.covers) {
		return fmt.Errorf("%w: it covers %d bytes of %s", ErrIndex, x.covers, path)
	}
	return nil
}

// SealRest seals what processes that are gone left behind in a folder, and removes what a killed Seal left.
func SealRest(dir string, compress bool) (err error) {
	left, globErr := jsonl.Glob(dir, filePrefix+"-*"+jsonl.Packed+".tmp")
	err = errors.Join(err, globErr)
	for _, n := range left {
		if jsonl.Unused(n) {
			os.Remove(n)
		}
	}
	for _, suffix := range []string{lineSuffix, amendSuffix} {
		names, listErr := jsonl.Files(dir, filePrefix, suffix)
		err = errors.Join(err, listErr)
		for _, n := range names {
			if !jsonl.Unused(n) {
				continue
			}
			if !strings.HasSuffix(n, jsonl.Packed) { // a killed Seal had both
				os.Remove(n + jsonl.Packed)
				os.Remove(n + jsonl.Packed + IndexSuffix)
			}
			err = errors.Join(err, Seal(n, compress && suffix == lineSuffix))
		}
	}
	return err
}

// scan reads the ids of a file's lines. What is no line of a timeline has no entry.
func scan(path string) (entries []entry, covers int64, err error) {
	err = jsonl.Read(path, func(b []byte, _ int, offset int64) error {
		covers = offset + int64(len(b)) + 1
		for _, id := range idsOf(b) {
			if id != "" {
				entries = append(entries, entry{hashID(id), offset})
			}
		}
		return nil
	}, func(int, error) {})
	return entries, covers, err
}

// idsOf reads both ids, which stand at the beginning of a line, and no more of it.
func idsOf(line []byte) (ids [2]string) {
	r := jsonline.NewReader(string(line[:min(len(line), 2*maxID+256)]))
	if !r.Object() {
		return ids
	}
	for seen := 0; seen < 2; {
		key, ok := r.Key()
		if !ok {
			break
		}
		switch key {
		case "request_id":
			ids[0] = r.String()
			seen++
		case "client_request_id":
			ids[1] = r.String()
			seen++
		default:
			r.Skip()
		}
	}
	return ids
}

// replaceFile writes a file that is either whole or not there.
func replaceFile(path string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*.tmp")
	if err != nil {
		return fmt.Errorf("write index: %w", err)
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Chmod(f.Name(), 0o644)
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("write index %s: %w", path, err)
	}
	return nil
}
