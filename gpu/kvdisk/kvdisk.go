// Package kvdisk owns the files that keep KV blocks when the process ends: slots of a fixed size, each with the name of what it
// holds and a checksum. It knows bytes and files, no engine; which slot holds what is the decision of gpu/kv.
//
// A folder has two files. kv.index begins with a page that says whose KV this is (identity, tokens and bytes of a block), then
// has one entry a slot; kv.blocks has the bytes of slot i at i times their size. In little endian:
//
//	page   0 magic u32   4 version u32   8 tokens u32   12 crc32c u32   16 bytes u64   24 length of the identity u32   28 identity
//	entry  0 crc32c u32  4 crc32c of the block u32   8 parent hash u64   16 hash u64   24 parent serial u64   32 serial u64   40 tokens i32…
//
// The first checksum of a page or an entry is over the rest of it. An entry is emptied before its block is written, and written
// after it, so that a process that is killed leaves an empty slot; whatever else happens to the files, what is read is compared
// with its checksum. Nothing is synced: a machine that loses power may lose blocks, never more.
package kvdisk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"meridian.internal/gpu/kv"
	"meridian.internal/shared/blockhash"
)

const (
	magic     = 0x444b564d // "MVKD" in little endian
	version   = 1
	pageBytes = 4096
	pageHead  = 28
	entryHead = 40
)

// ErrCorrupt is returned when a slot does not hold what was written.
var ErrCorrupt = errors.New("kvdisk: corrupt block")

// ErrInUse is returned when another process has the folder.
var ErrInUse = errors.New("another process has this folder of KV blocks; give each node one of its own")

// Options of a folder of blocks.
type Options struct {
	Dir      string
	Slots    int    // blocks that are kept, at least 1
	Identity string // of model and numerics: what was written under another one is discarded
	Tokens   int    // of a block
	Block    int    // bytes of a block; 0: entries alone are kept
}

// Files are the open files. Read and Write may be called by several goroutines at once, for different slots.
type Files struct {
	o      Options
	lock   *os.File
	index  *os.File
	blocks *os.File
}

// Open opens or makes the files of a folder and gives what they hold. discarded says why what they held before cannot be used;
// empty: it can, or there was nothing.
func Open(o Options) (f *Files, kept []kv.Kept, discarded string, err error) {
	f = &Files{o: o}
	if o.Slots < 1 {
		return nil, nil, "", fmt.Errorf("kvdisk: %d blocks, want at least 1", o.Slots)
	}
	if len(o.Identity) > pageBytes-pageHead {
		return nil, nil, "", fmt.Errorf("kvdisk: identity of %d bytes, at most %d are kept", len(o.Identity), pageBytes-pageHead)
	}
	if err = f.open(); err == nil {
		kept, discarded, err = f.load()
	}
	if err != nil {
		f.Close()
		return nil, nil, "", err
	}
	return f, kept, discarded, nil
}

// open opens the files, the lock first.
func (f *Files) open() (err error) {
	if err := os.MkdirAll(f.o.Dir, 0o700); err != nil {
		return fmt.Errorf("make the folder of KV blocks: %w", err)
	}
	if f.lock, err = f.file("lock"); err != nil {
		return err
	}
	if err := syscall.Flock(int(f.lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("%w: %s", ErrInUse, f.o.Dir)
	}
	if f.index, err = f.file("kv.index"); err != nil {
		return err
	}
	f.blocks, err = f.file("kv.blocks")
	return err
}

func (f *Files) file(name string) (*os.File, error) {
	x, err := os.OpenFile(filepath.Join(f.o.Dir, name), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the files of KV blocks: %w", err)
	}
	return x, nil
}

// Close closes the files; the folder may then be opened again.
func (f *Files) Close() {
	for _, x := range []*os.File{f.index, f.blocks, f.lock} {
		if x != nil {
			_ = x.Close() // nothing is buffered here
		}
	}
}

// load reads what an earlier process has left, or begins anew.
func (f *Files) load() (kept []kv.Kept, discarded string, err error) {
	page := make([]byte, pageBytes)
	switch _, err := io.ReadFull(f.index, page); {
	case errors.Is(err, io.EOF): // new
	case errors.Is(err, io.ErrUnexpectedEOF):
		discarded = "its first page is cut off"
	case err != nil:
		return nil, "", fmt.Errorf("read the index of KV blocks: %w", err)
	default:
		if discarded = f.check(page); discarded == "" {
			kept, err := f.entries()
			return kept, "", err
		}
	}
	if err := errors.Join(cut(f.index, 0), cut(f.blocks, 0)); err != nil {
		return nil, "", err
	}
	if _, err := f.index.WriteAt(f.page(), 0); err != nil {
		return nil, "", fmt.Errorf("write the index of KV blocks: %w", err)
	}
	return nil, discarded, nil
}

func (f *Files) page() []byte {
	le, b := binary.LittleEndian, make([]byte, pageBytes)
	le.PutUint32(b, magic)
	le.PutUint32(b[4:], version)
	le.PutUint32(b[8:], uint32(f.o.Tokens))
	le.PutUint64(b[16:], uint64(f.o.Block))
	le.PutUint32(b[24:], uint32(len(f.o.Identity)))
	copy(b[pageHead:], f.o.Identity)
	le.PutUint32(b[12:], pageSum(b))
	return b
}

func pageSum(b []byte) uint32 { return crc(append(append([]byte(nil), b[:12]...), b[16:]...)) }

// check says why a page is not one of ours, empty if it is.
func (f *Files) check(b []byte) string {
	le := binary.LittleEndian
	n := le.Uint32(b[24:])
	switch {
	case le.Uint32(b) != magic:
		return "it is no index of KV blocks"
	case le.Uint32(b[4:]) != version:
		return fmt.Sprintf("it is of version %d, this is %d", le.Uint32(b[4:]), version)
	case le.Uint32(b[12:]) != pageSum(b) || n > pageBytes-pageHead:
		return "its first page is corrupt"
	case string(b[pageHead:pageHead+n]) != f.o.Identity:
		return fmt.Sprintf("it is of %s, the node serves %s", b[pageHead:pageHead+n], f.o.Identity)
	case int(le.Uint32(b[8:])) != f.o.Tokens || le.Uint64(b[16:]) != uint64(f.o.Block):
		return fmt.Sprintf("its blocks have %d tokens and %d bytes, the node's %d and %d", le.Uint32(b[8:]), le.Uint64(b[16:]), f.o.Tokens, f.o.Block)
	}
	return ""
}

// entries reads the index. Slots beyond the size that is wanted now are cut off.
func (f *Files) entries() ([]kv.Kept, error) {
	end := int64(pageBytes) + int64(f.o.Slots)*int64(f.entryBytes())
	if err := errors.Join(cut(f.index, end), cut(f.blocks, int64(f.o.Slots)*int64(f.o.Block))); err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.NewSectionReader(f.index, pageBytes, end-pageBytes))
	if err != nil {
		return nil, fmt.Errorf("read the index of KV blocks: %w", err)
	}
	var kept []kv.Kept
	size := f.entryBytes()
	for i := 0; (i+1)*size <= len(b); i++ {
		if k, _, ok := parseEntry(b[i*size : (i+1)*size]); ok {
			k.Slot = int32(i)
			kept = append(kept, k)
		}
	}
	return kept, nil
}

// cut shortens a file to a size, if it is longer.
func cut(f *os.File, size int64) error {
	info, err := f.Stat()
	if err == nil && info.Size() > size {
		err = f.Truncate(size)
	}
	if err != nil {
		return fmt.Errorf("cut the files of KV blocks to %d bytes: %w", size, err)
	}
	return nil
}

func (f *Files) entryBytes() int { return entryHead + 4*f.o.Tokens }

func (f *Files) entryAt(slot int32) int64 { return pageBytes + int64(slot)*int64(f.entryBytes()) }

// appendEntry writes the entry of a block with that checksum.
func appendEntry(b []byte, k *kv.Kept, sum uint32) []byte {
	le, at := binary.LittleEndian, len(b)
	b = le.AppendUint32(b, 0)
	b = le.AppendUint32(b, sum)
	for _, v := range [4]uint64{uint64(k.ParentHash), uint64(k.Hash), k.ParentSerial, k.Serial} {
		b = le.AppendUint64(b, v)
	}
	for _, t := range k.Tokens {
		b = le.AppendUint32(b, uint32(t))
	}
	le.PutUint32(b[at:], crc(b[at+4:]))
	return b
}

// parseEntry reads an entry and the checksum of its block. Not ok: it is empty, or was not written to its end.
func parseEntry(b []byte) (k kv.Kept, sum uint32, ok bool) {
	le := binary.LittleEndian
	if len(b) < entryHead || le.Uint32(b) != crc(b[4:]) {
		return k, 0, false
	}
	sum = le.Uint32(b[4:])
	k.ParentHash, k.Hash = blockhash.Hash(le.Uint64(b[8:])), blockhash.Hash(le.Uint64(b[16:]))
	k.ParentSerial, k.Serial = le.Uint64(b[24:]), le.Uint64(b[32:])
	for b = b[entryHead:]; len(b) >= 4; b = b[4:] {
		k.Tokens = append(k.Tokens, int32(le.Uint32(b)))
	}
	return k, sum, k.Serial != 0
}

func crc(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }

// Write puts a block into a slot. After an error the slot is empty.
func (f *Files) Write(k kv.Kept, data []byte) error {
	if len(data) != f.o.Block || len(k.Tokens) != f.o.Tokens {
		return fmt.Errorf("kvdisk: a block of %d bytes and %d tokens, the slots are for %d and %d", len(data), len(k.Tokens), f.o.Block, f.o.Tokens)
	}
	if err := f.empty(k.Slot); err != nil {
		return err
	}
	if _, err := f.blocks.WriteAt(data, int64(k.Slot)*int64(f.o.Block)); err != nil {
		return fmt.Errorf("write KV block to slot %d: %w", k.Slot, err)
	}
	if _, err := f.index.WriteAt(appendEntry(nil, &k, crc(data)), f.entryAt(k.Slot)); err != nil {
		return errors.Join(fmt.Errorf("write the entry of slot %d: %w", k.Slot, err), f.empty(k.Slot))
	}
	return nil
}

// empty makes the entry of a slot that may have one invalid.
func (f *Files) empty(slot int32) error {
	if _, err := f.index.WriteAt(make([]byte, entryHead), f.entryAt(slot)); err != nil {
		return fmt.Errorf("empty slot %d: %w", slot, err)
	}
	return nil
}

// Read reads the block of a slot.
func (f *Files) Read(k kv.Kept, data []byte) error {
	entry := make([]byte, f.entryBytes())
	if _, err := f.index.ReadAt(entry, f.entryAt(k.Slot)); err != nil {
		return fmt.Errorf("%w: entry of slot %d: %w", ErrCorrupt, k.Slot, err)
	}
	here, sum, ok := parseEntry(entry)
	if !ok || here.Hash != k.Hash || here.Serial != k.Serial {
		return fmt.Errorf("%w: slot %d is not said to hold %x", ErrCorrupt, k.Slot, uint64(k.Hash))
	}
	if _, err := f.blocks.ReadAt(data, int64(k.Slot)*int64(f.o.Block)); err != nil {
		return fmt.Errorf("%w: slot %d: %w", ErrCorrupt, k.Slot, err)
	}
	if got := crc(data); got != sum {
		return fmt.Errorf("%w: slot %d has checksum %08x, written was %08x", ErrCorrupt, k.Slot, got, sum)
	}
	return nil
}
