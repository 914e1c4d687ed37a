package kvwire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// Type says what a frame is.
type Type uint8

// The frame types. JSON payloads are described in message.go.
const (
	TypeHello    Type = 1  // receiver: Hello
	TypeHelloAck Type = 2  // sender: Hello
	TypeRefuse   Type = 3  // sender: Fault; the connection ends
	TypeClaim    Type = 4  // receiver: hold the lease of this id, the request comes when there is room
	TypeRequest  Type = 5  // receiver: Want
	TypeKV       Type = 6  // sender: KV elements
	TypeTrailer  Type = 7  // sender: Trailer
	TypeAck      Type = 8  // receiver: everything is installed
	TypeCancel   Type = 9  // receiver: no longer wanted
	TypeError    Type = 10 // sender: Fault; the connection stays
	TypePing     Type = 11 // both: still here
	TypeProof    Type = 12 // receiver: Proof, where the cluster has a secret
	TypeAttach   Type = 13 // receiver: where does your KV lie?
	TypeShared   Type = 14 // sender: backend.Shared
	TypeWritten  Type = 15 // sender: the blocks that hold KV which the receiver copies itself
	TypeFetch    Type = 16 // receiver: token ids of a prompt, of whose beginning it wants what is cached
)

const (
	magic   = 0x31564b4d // "MKV1" in little endian
	version = 1
	// HeaderSize is the size of a frame header in bytes.
	HeaderSize = 48
	// maxControl bounds the payload of every frame that is not KV.
	maxControl = 256 << 10
	// maxKV bounds the payload of a KV frame.
	maxKV = 4 << 20
	// frameGoal is the payload that a sender aims at: small enough that a cancel is heard soon, large enough that headers
	// and system calls do not matter.
	frameGoal = 1 << 20
	crcAt     = 12
)

// ErrFrame is returned when bytes are no valid frame; the connection cannot go on.
var ErrFrame = errors.New("kvwire: bad frame")

// Header is a frame's fixed part:
//
//	0  magic u32      4 version u8   5 type u8   6 flags u16   8 length u32   12 crc32c u32
//	16 request i64   24 epoch u64   32 layer from,to u16      36 head from,to u16
//	40 token from,to u32
//
// All in little endian. The checksum is CRC-32C over the header with its own four bytes zero, then the payload.
type Header struct {
	Type               Type
	Flags              uint16 // 0; a receiver ignores what it does not know
	Length             uint32 // of the payload, bytes
	Request            int64  // disagg_request_id; 0 where a frame belongs to the connection
	Epoch              uint64 // incarnation of the sending process
	LayerFrom, LayerTo uint16
	HeadFrom, HeadTo   uint16
	TokenFrom, TokenTo uint32
	sum, begun         uint32 // the frame's checksum, and that of its header alone
}

// AppendHeader appends the header of a frame with this payload; it sets length and checksum itself.
func AppendHeader(b []byte, h Header, payload []byte) []byte {
	at := len(b)
	le := binary.LittleEndian
	b = le.AppendUint32(b, magic)
	b = append(b, version, byte(h.Type))
	b = le.AppendUint16(b, h.Flags)
	b = le.AppendUint32(b, uint32(len(payload)))
	b = le.AppendUint32(b, 0)
	b = le.AppendUint64(b, uint64(h.Request))
	b = le.AppendUint64(b, h.Epoch)
	for _, v := range [4]uint16{h.LayerFrom, h.LayerTo, h.HeadFrom, h.HeadTo} {
		b = le.AppendUint16(b, v)
	}
	b = le.AppendUint32(b, h.TokenFrom)
	b = le.AppendUint32(b, h.TokenTo)
	le.PutUint32(b[at+crcAt:], checksum(headerSum(b[at:at+HeaderSize]), payload))
	return b
}

// ParseHeader reads a header. The checksum is not checked, since the payload is not there yet.
func ParseHeader(b []byte) (Header, error) {
	if len(b) < HeaderSize {
		return Header{}, fmt.Errorf("%w: %d bytes, a header has %d", ErrFrame, len(b), HeaderSize)
	}
	le := binary.LittleEndian
	if m := le.Uint32(b); m != magic {
		return Header{}, fmt.Errorf("%w: magic %08x, want %08x", ErrFrame, m, uint32(magic))
	}
	if b[4] != version {
		return Header{}, fmt.Errorf("%w: version %d, this build speaks %d", ErrFrame, b[4], version)
	}
	h := Header{
		Type: Type(b[5]), Flags: le.Uint16(b[6:]), Length: le.Uint32(b[8:]), sum: le.Uint32(b[crcAt:]),
		Request: int64(le.Uint64(b[16:])), Epoch: le.Uint64(b[24:]),
		LayerFrom: le.Uint16(b[32:]), LayerTo: le.Uint16(b[34:]), HeadFrom: le.Uint16(b[36:]), HeadTo: le.Uint16(b[38:]),
		TokenFrom: le.Uint32(b[40:]), TokenTo: le.Uint32(b[44:]), begun: headerSum(b),
	}
	limit := uint32(maxControl)
	if h.Type == TypeKV {
		limit = maxKV
	}
	if h.Type < TypeHello || h.Type > TypeFetch {
		return Header{}, fmt.Errorf("%w: type %d is unknown", ErrFrame, h.Type)
	}
	if h.Length > limit {
		return Header{}, fmt.Errorf("%w: payload of %d bytes, type %d may have %d", ErrFrame, h.Length, h.Type, limit)
	}
	return h, nil
}

// headerSum is CRC-32C over a header, its checksum field taken as zero.
func headerSum(header []byte) uint32 {
	var zero [4]byte
	return checksum(checksum(checksum(0, header[:crcAt]), zero[:]), header[crcAt+4:HeaderSize])
}

// checksum goes on with a CRC-32C.
func checksum(sum uint32, b []byte) uint32 {
	return crc32.Update(sum, crc32.MakeTable(crc32.Castagnoli), b) // MakeTable returns the shared table
}

// check compares the checksum of a frame.
func (h Header) check(payload []byte) error {
	if sum := checksum(h.begun, payload); sum != h.sum {
		return fmt.Errorf("%w: checksum %08x, the frame says %08x", ErrFrame, sum, h.sum)
	}
	return nil
}

// readFrame reads one frame. accept looks at the header before anything is allocated or read by its claim. The payload
// lies in buf if that is large enough.
func readFrame(r io.Reader, buf []byte, accept func(Header) error) (Header, []byte, error) {
	h, payload, err := readUnchecked(r, func(n int) []byte {
		if cap(buf) < n {
			return make([]byte, n)
		}
		return buf[:n]
	}, accept)
	if err == nil {
		err = h.check(payload)
	}
	if err != nil {
		return h, nil, err
	}
	return h, payload, nil
}

// readUnchecked reads one frame into what room gives for its payload, whose checksum the caller has to check.
func readUnchecked(r io.Reader, room func(n int) []byte, accept func(Header) error) (Header, []byte, error) {
	var raw [HeaderSize]byte
	if _, err := io.ReadFull(r, raw[:]); err != nil {
		return Header{}, nil, err
	}
	h, err := ParseHeader(raw[:])
	if err != nil {
		return Header{}, nil, err
	}
	if accept != nil {
		if err := accept(h); err != nil {
			return h, nil, err
		}
	}
	payload := room(int(h.Length))
	if _, err := io.ReadFull(r, payload); err != nil {
		return h, nil, fmt.Errorf("read payload of %d bytes: %w", h.Length, noEOF(err))
	}
	return h, payload, nil
}

// noEOF: inside a frame the end of the stream is never a clean end.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
