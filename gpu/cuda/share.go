//go:build cuda

package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"unsafe"

	"meridian.internal/gpu/backend"
)

// shareKind names CUDA's sharing of memory between processes of one host.
const shareKind = "cuda-ipc"

// handleBytes is the size of a CUipcMemHandle.
const handleBytes = 64

// share makes the KV known to other processes, if it is one group of layers; without the system's leave nothing is shared.
func (b *Backend) share(c *context, kv address) {
	handle := make([]byte, handleBytes)
	if err := c.do("cuIpcGetMemHandle", uintptr(unsafe.Pointer(&handle[0])), uintptr(kv)); err != nil {
		return
	}
	i := b.info
	b.shared = backend.Shared{
		Kind: shareKind, Card: string(cardID(c.uuid)), Handle: handle, KVType: i.KVType, KVHeads: i.KVHeads, HeadSize: i.HeadSize,
		LayerFrom: i.Stage.First, LayerTo: i.Stage.End, TokensPerBlock: i.TokensPerBlock, KVBlocks: i.KVBlocks,
	}
}

// Share implements backend.Sharer.
func (b *Backend) Share() (backend.Shared, bool) { return b.shared, b.shared.Kind != "" }

// Attach implements backend.Sharer.
func (b *Backend) Attach(s backend.Shared) (backend.Attached, error) {
	if err := attachable(b.info, s); err != nil {
		return nil, err
	}
	a, opened := &attached{b: b, from: s}, make(chan error, 1)
	if !b.pulls.Push(func(i *importer, err error) {
		if err == nil {
			a.at, err = i.openShared(s.Handle)
		}
		opened <- err
	}) {
		return nil, backend.ErrClosed
	}
	if err := <-opened; err != nil {
		return nil, fmt.Errorf("open the KV of another process on card %s: %w", s.Card, err)
	}
	return a, nil
}

// attachable tells whether this back end can copy out of such KV. Only the number of tokens of a block may differ.
func attachable(i backend.Info, s backend.Shared) error {
	if len(i.Windows) > 0 {
		return errors.New("cuda: KV of layers with windows is not read in place")
	}
	if s.Kind != shareKind || len(s.Handle) != handleBytes {
		return fmt.Errorf("cuda: KV shared by %q with a handle of %d bytes; want %q and %d", s.Kind, len(s.Handle), shareKind, handleBytes)
	}
	if s.KVType != i.KVType || s.KVHeads != i.KVHeads || s.HeadSize != i.HeadSize || s.LayerFrom != i.Stage.First || s.LayerTo != i.Stage.End {
		return fmt.Errorf("cuda: shared KV has layers [%d, %d), %d heads of %d elements of %s; here are [%d, %d), %d of %d, %s",
			s.LayerFrom, s.LayerTo, s.KVHeads, s.HeadSize, s.KVType, i.Stage.First, i.Stage.End, i.KVHeads, i.HeadSize, i.KVType)
	}
	if s.TokensPerBlock < 1 || s.KVBlocks < 1 {
		return fmt.Errorf("cuda: shared KV has %d blocks of %d tokens; must be at least 1", s.KVBlocks, s.TokensPerBlock)
	}
	return nil
}

// attached implements backend.Attached.
type attached struct {
	b    *Backend
	from backend.Shared
	at   address
}

// Pull implements backend.Attached.
func (a *attached) Pull(p backend.Pull) *backend.Copy {
	c := backend.NewCopy()
	if !a.b.pulls.Push(func(i *importer, err error) {
		c.StartNS = a.b.now()
		if c.Err = err; err == nil {
			c.Err = i.pull(a, p)
		}
		c.EndNS = a.b.now()
		c.Finish()
	}) {
		c.Err = backend.ErrClosed
		c.Finish()
	}
	return c
}

// Close implements backend.Attached.
func (a *attached) Close() error {
	closed := make(chan error, 1)
	if !a.b.pulls.Push(func(i *importer, err error) {
		if err == nil {
			err = i.do("cuIpcCloseMemHandle", uintptr(a.at))
		}
		closed <- err
	}) {
		return nil // the card's context has closed it
	}
	return <-closed
}

// importer copies out of other processes' KV on a stream of its own. One goroutine owns it.
type importer struct {
	*launcher
	info backend.Info
	kv   address
	list buffer
	desc pinned // blocks here, then there
}

// pullAll is the importer's goroutine.
func (b *Backend) pullAll(c *context, d *device) {
	runtime.LockOSThread()
	var i *importer
	err := c.current()
	if err == nil {
		var s *stream
		if s, err = c.newStream(); err == nil {
			i = &importer{launcher: newLauncher(s, d.kernels), info: d.info, kv: d.kv[0]}
		}
	}
	for job, ok := b.pulls.Pop(); ok; job, ok = b.pulls.Pop() {
		job(i, err)
	}
	if i != nil {
		err = firstOf(i.free(i.list.at), i.freePinned(&i.desc), i.do("cuStreamDestroy_v2", i.handle))
	}
	b.fail(err)
}

// openShared opens a handle, which the driver takes by value: 64 bytes on the stack behind the registers on amd64, by
// address on arm64.
func (i *importer) openShared(handle []byte) (address, error) {
	const lazyPeerAccess = 1 // the memory may lie on another card of the host
	var a address
	if runtime.GOARCH != "amd64" {
		err := i.do("cuIpcOpenMemHandle_v2", uintptr(unsafe.Pointer(&a)), uintptr(unsafe.Pointer(&handle[0])), lazyPeerAccess)
		return a, err
	}
	var w [handleBytes / 8]uintptr
	for j := range w {
		w[j] = uintptr(binary.LittleEndian.Uint64(handle[8*j:]))
	}
	err := i.do("cuIpcOpenMemHandle_v2", uintptr(unsafe.Pointer(&a)), lazyPeerAccess, 0, 0, 0, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7])
	return a, err
}

func (i *importer) pull(a *attached, p backend.Pull) error {
	if err := checkPull(i.info, a.from, p); err != nil {
		return err
	}
	n := 4 * (len(p.To) + len(p.From))
	if err := i.growPinned(&i.desc, max(n, 1<<16)); err != nil {
		return err
	}
	if _, err := i.grow(&i.list, max(n, 1<<16)); err != nil {
		return err
	}
	d := words[int32](i.desc.bytes())
	copy(d, p.To)
	copy(d[len(p.To):], p.From)
	if err := i.upload(i.list.at, i.desc.at, n); err != nil {
		return err
	}
	const warps, perCore = 8, 8 // of a block; blocks on a multiprocessor
	layers, tokens, first := p.LayerTo-p.LayerFrom, p.TokenTo-p.TokenFrom, i.info.Stage.First
	i.launch("pullKV", grid{x: min((layers*2*tokens+warps-1)/warps, perCore*i.cores), threads: 32 * warps}, uint64(i.kv), uint64(a.at), uint64(i.list.at),
		uint64(i.list.at)+uint64(4*len(p.To)), number(p.LayerFrom-first), number(layers), number(i.info.Stage.End-first), number(p.TokenFrom), number(tokens), number(a.from.TokensPerBlock))
	if err := i.taken(); err != nil {
		return err
	}
	return i.wait()
}

// checkPull sees that a pull lies within both sides.
func checkPull(here backend.Info, there backend.Shared, p backend.Pull) error {
	if p.LayerFrom < here.Stage.First || p.LayerFrom >= p.LayerTo || p.LayerTo > here.Stage.End || p.TokenFrom < 0 || p.TokenFrom >= p.TokenTo {
		return fmt.Errorf("cuda: pull layers [%d, %d) of tokens [%d, %d); the stage has [%d, %d)",
			p.LayerFrom, p.LayerTo, p.TokenFrom, p.TokenTo, here.Stage.First, here.Stage.End)
	}
	for _, side := range []struct {
		name     string
		blocks   []int32
		per, all int
	}{{"there", p.From, there.TokensPerBlock, there.KVBlocks}, {"here", p.To, here.TokensPerBlock, here.KVBlocks}} {
		if want := (p.TokenTo-1)/side.per - p.TokenFrom/side.per + 1; len(side.blocks) != want {
			return fmt.Errorf("cuda: pull tokens [%d, %d) with %d blocks %s, want %d", p.TokenFrom, p.TokenTo, len(side.blocks), side.name, want)
		}
		if i := slices.IndexFunc(side.blocks, func(b int32) bool { return b < 0 || int(b) >= side.all }); i >= 0 {
			return fmt.Errorf("cuda: pull KV block %d %s, there are %d", side.blocks[i], side.name, side.all)
		}
	}
	return nil
}
