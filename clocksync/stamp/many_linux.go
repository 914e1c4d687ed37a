package stamp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"meridian.internal/shared/clock"
)

const (
	// BatchSize is how many datagrams one system call carries. So many sending stamps fit into the socket's buffer.
	BatchSize = 64
	dataSize  = 128 // a longer datagram is cut, which its reader sees by its length
	oobSize   = 192
	rcvBuf    = 1 << 20
)

// Many is an unconnected UDP socket for packets to many peers at once, with stamps of the kernel. Nothing waits on it: it is
// read when its owner thinks that replies have come, so that a packet wakes nobody. One goroutine may use it.
type Many struct {
	mapper
	fd   int
	v6   bool
	sent uint32 // sends since the kernel's counter was armed

	hdrs  [BatchSize]unix.Mmsghdr
	iovs  [BatchSize]unix.Iovec
	names [BatchSize]unix.RawSockaddrInet6 // has room for an IPv4 address too
	data  [BatchSize][dataSize]byte
	oob   [BatchSize][oobSize]byte
}

// Datagram is what is sent.
type Datagram struct {
	To   netip.AddrPort
	Data []byte // must not be empty
}

// OpenMany opens a socket of one address family. Without stamps of the kernel it is an error.
func OpenMany(s *clock.Steady, v6 bool) (*Many, error) {
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open a clock socket for many peers: %w", err)
	}
	m := &Many{mapper: newMapper(s), fd: fd, v6: v6}
	if err := m.arm(); err != nil {
		unix.Close(fd)
		return nil, err
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, rcvBuf) // what the system allows is enough for a batch
	return m, nil
}

// Close ends it.
func (m *Many) Close() { unix.Close(m.fd) }

// arm starts the kernel's count of sends anew.
func (m *Many) arm() error {
	m.sent = 0
	for _, flags := range []int{0, tsFlags} {
		if err := unix.SetsockoptInt(m.fd, unix.SOL_SOCKET, unix.SO_TIMESTAMPING, flags); err != nil {
			return fmt.Errorf("turn kernel stamps on: %w", err)
		}
	}
	return nil
}

// Send writes the first datagrams of ds, at most BatchSize. beforeNS was read before the first write; the ids, from first on,
// are those that Sent will name. With an error ds[0] was not sent, and stamps of earlier sends are lost: the count begins
// anew, since nobody knows whether the failed send was counted.
func (m *Many) Send(ds []Datagram) (n int, beforeNS int64, first uint32, err error) {
	ds = ds[:min(len(ds), BatchSize)]
	for i, d := range ds {
		m.iovs[i].Base = unsafe.SliceData(d.Data)
		m.iovs[i].SetLen(len(d.Data))
		m.hdrs[i] = unix.Mmsghdr{Hdr: unix.Msghdr{Name: (*byte)(unsafe.Pointer(&m.names[i])), Namelen: m.putAddr(i, d.To), Iov: &m.iovs[i]}}
		m.hdrs[i].Hdr.SetIovlen(1)
	}
	beforeNS, first = m.steady.Now(), m.sent
	n, err = m.call(unix.SYS_SENDMMSG, len(ds), 0)
	if err != nil {
		m.each(unix.MSG_ERRQUEUE, func(int, int, int) {})
		if aerr := m.arm(); aerr != nil {
			err = errors.Join(err, aerr)
		}
		return 0, 0, 0, fmt.Errorf("send clock packet to %s: %w", ds[0].To, err)
	}
	m.sent += uint32(n)
	return n, beforeNS, first, nil
}

// Receive hands over what has come. It does not wait; data is valid during the call. Not ok: the wall clock was stepped, so
// that stamps of the kernel from before are worth nothing.
func (m *Many) Receive(each func(from netip.AddrPort, data []byte, rx RX)) (ok bool) {
	ok = true
	var now int64
	m.each(0, func(i, length, oobLen int) {
		if i == 0 {
			ok = m.renew() && ok
			now = m.steady.Now()
		}
		rx := RX{NS: now}
		if wall, found := parseRX(m.oob[i][:oobLen]); found && ok {
			if ns, half, placed := m.place(wall); placed {
				rx = RX{NS: ns, ErrNS: half, Kernel: true}
			}
		}
		each(m.addr(i), m.data[i][:length], rx)
	})
	return ok
}

// Sent hands over the sending stamps that the kernel has ready. It does not wait. Not ok: as of Receive.
func (m *Many) Sent(each func(TX)) (ok bool) {
	ok = true
	m.each(unix.MSG_ERRQUEUE, func(i, _, oobLen int) {
		if i == 0 {
			ok = m.renew() && ok
		}
		if id, wall, found := parseTX(m.oob[i][:oobLen]); found && ok {
			if ns, half, placed := m.place(wall); placed {
				each(TX{ID: id, NS: ns, ErrNS: half})
			}
		}
	})
	return ok
}

// each reads until the queue is empty and names each message's place in its batch, and the lengths of data and oob.
func (m *Many) each(flags int, f func(i, length, oobLen int)) {
	for {
		for i := range m.hdrs {
			m.iovs[i].Base = &m.data[i][0]
			m.iovs[i].SetLen(dataSize)
			h := unix.Msghdr{
				Name: (*byte)(unsafe.Pointer(&m.names[i])), Namelen: unix.SizeofSockaddrInet6, Iov: &m.iovs[i], Control: &m.oob[i][0],
			}
			h.SetIovlen(1)
			h.SetControllen(oobSize)
			m.hdrs[i] = unix.Mmsghdr{Hdr: h}
		}
		n, err := m.call(unix.SYS_RECVMMSG, BatchSize, flags|unix.MSG_DONTWAIT)
		if err != nil {
			return // empty, or an error that a peer's machine reported: its packet is lost
		}
		for i := range n {
			f(i, min(int(m.hdrs[i].Len), dataSize), min(int(m.hdrs[i].Hdr.Controllen), oobSize))
		}
		if n < BatchSize {
			return
		}
	}
}

func (m *Many) call(number uintptr, n, flags int) (int, error) {
	for {
		r, _, errno := unix.Syscall6(number, uintptr(m.fd), uintptr(unsafe.Pointer(&m.hdrs)), uintptr(n), uintptr(flags), 0, 0)
		if errno == 0 {
			return int(r), nil
		}
		if errno != unix.EINTR {
			return 0, errno
		}
	}
}

// putAddr writes an address in the form of the kernel and returns its length.
func (m *Many) putAddr(i int, a netip.AddrPort) uint32 {
	if m.v6 {
		m.names[i] = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: swapped(a.Port()), Addr: a.Addr().As16()}
		return unix.SizeofSockaddrInet6
	}
	v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(&m.names[i]))
	*v4 = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: swapped(a.Port()), Addr: a.Addr().As4()}
	return unix.SizeofSockaddrInet4
}

func (m *Many) addr(i int) netip.AddrPort {
	if m.v6 {
		return netip.AddrPortFrom(netip.AddrFrom16(m.names[i].Addr), swapped(m.names[i].Port))
	}
	v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(&m.names[i]))
	return netip.AddrPortFrom(netip.AddrFrom4(v4.Addr), swapped(v4.Port))
}

// swapped turns a port from the host's order into the network's, and back.
func swapped(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}
