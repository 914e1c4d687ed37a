package ntp

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"errors"
	"fmt"
)

// Size of every packet, request and reply alike: a reply is never larger than what asked for it.
const Size = 64

// The errors of ParsePacket.
var (
	ErrPacket = errors.New("ntp: no clock packet") // is returned when size, magic, version or flags do not fit
	ErrMAC    = errors.New("ntp: wrong MAC")       // is returned when the key does not fit
)

const (
	magic   = 0x4d43 // "MC"
	version = 1
	macAt   = 56

	flagReply    = 1 << 0
	flagKernelRX = 1 << 1
	flagPrevTX   = 1 << 2
	flagPair     = 1 << 3
	flagsKnown   = flagReply | flagKernelRX | flagPrevTX | flagPair
)

// Packet is the 64-byte datagram, big-endian:
//
//	 0 magic u16 | version u8 | flags u8 | stamp error ns u16 | pair error ns u16
//	 8 seq u32 | instance u32
//	16 epoch u64 of the sender's clock
//	24 T2, or in a request the seq of the previous exchange
//	32 T3 as the program read it before the write
//	40 T3 of the previous reply, as the kernel sent it
//	48 raw - steady of the sender's clocks
//	56 HMAC-SHA256, first 8 bytes; zero without a key
//
// T1 does not travel: the client knows it by Seq, which it draws at random.
type Packet struct {
	Reply     bool
	KernelRX  bool // T2 is the kernel's stamp
	HasPrevTX bool
	HasPair   bool
	Seq       uint32
	PrevSeq   uint32 // request only
	Epoch     uint64
	Instance  uint32
	ErrNS     uint16 // how far T2 and PrevTX may be off
	PairErrNS uint16
	T2, T3    int64 // reply only
	PrevTX    int64
	RawDiffNS int64 // CLOCK_MONOTONIC_RAW - steady clock
}

// Append writes p to b, with a MAC when key is not empty.
func (p Packet) Append(b, key []byte) []byte {
	var w [Size]byte
	be := binary.BigEndian
	be.PutUint16(w[0:], magic)
	w[2] = version
	w[3] = p.flags()
	be.PutUint16(w[4:], p.ErrNS)
	be.PutUint16(w[6:], p.PairErrNS)
	be.PutUint32(w[8:], p.Seq)
	be.PutUint32(w[12:], p.Instance)
	be.PutUint64(w[16:], p.Epoch)
	if p.Reply {
		be.PutUint64(w[24:], uint64(p.T2))
		be.PutUint64(w[32:], uint64(p.T3))
	} else {
		be.PutUint64(w[24:], uint64(p.PrevSeq))
	}
	be.PutUint64(w[40:], uint64(p.PrevTX))
	be.PutUint64(w[48:], uint64(p.RawDiffNS))
	b = append(b, w[:]...)
	if len(key) > 0 {
		own := b[len(b)-Size:]
		copy(own[macAt:], mac(own[:macAt], key))
	}
	return b
}

func (p Packet) flags() (f byte) {
	for _, x := range []struct {
		bit byte
		set bool
	}{{flagReply, p.Reply}, {flagKernelRX, p.KernelRX}, {flagPrevTX, p.HasPrevTX}, {flagPair, p.HasPair}} {
		if x.set {
			f |= x.bit
		}
	}
	return f
}

// ParsePacket reads a datagram. With a key, only packets that the key signed are accepted; without one, only unsigned
// ones, so that a missing key is noticed.
func ParsePacket(b, key []byte) (Packet, error) {
	be := binary.BigEndian
	switch {
	case len(b) != Size:
		return Packet{}, fmt.Errorf("%w: %d bytes, want %d", ErrPacket, len(b), Size)
	case be.Uint16(b) != magic:
		return Packet{}, fmt.Errorf("%w: magic %#04x, want %#04x", ErrPacket, be.Uint16(b), magic)
	case b[2] != version:
		return Packet{}, fmt.Errorf("%w: version %d, want %d", ErrPacket, b[2], version)
	case b[3]&^byte(flagsKnown) != 0:
		return Packet{}, fmt.Errorf("%w: unknown flags %#02x", ErrPacket, b[3])
	}
	want := make([]byte, Size-macAt)
	if len(key) > 0 {
		want = mac(b[:macAt], key)
	}
	if subtle.ConstantTimeCompare(want, b[macAt:]) != 1 {
		return Packet{}, ErrMAC
	}
	f := b[3]
	p := Packet{
		Reply: f&flagReply != 0, KernelRX: f&flagKernelRX != 0, HasPrevTX: f&flagPrevTX != 0, HasPair: f&flagPair != 0,
		ErrNS: be.Uint16(b[4:]), PairErrNS: be.Uint16(b[6:]), Seq: be.Uint32(b[8:]), Instance: be.Uint32(b[12:]),
		Epoch: be.Uint64(b[16:]), PrevTX: int64(be.Uint64(b[40:])), RawDiffNS: int64(be.Uint64(b[48:])),
	}
	if p.Reply {
		p.T2, p.T3 = int64(be.Uint64(b[24:])), int64(be.Uint64(b[32:]))
		return p, nil
	}
	prev := be.Uint64(b[24:])
	if prev > 1<<32-1 || be.Uint64(b[32:]) != 0 {
		return Packet{}, fmt.Errorf("%w: a request with stamps", ErrPacket)
	}
	p.PrevSeq = uint32(prev)
	return p, nil
}

func mac(b, key []byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write(b)
	return h.Sum(nil)[:Size-macAt]
}
