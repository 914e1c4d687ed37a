package stamp

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"

	"golang.org/x/sys/unix"
)

// tsFlags: software stamps of both directions; sent ones come back through the error queue without the packet, named by a
// counter of sends.
const tsFlags = unix.SOF_TIMESTAMPING_SOFTWARE | unix.SOF_TIMESTAMPING_RX_SOFTWARE | unix.SOF_TIMESTAMPING_TX_SOFTWARE |
	unix.SOF_TIMESTAMPING_OPT_ID | unix.SOF_TIMESTAMPING_OPT_TSONLY

func arm(c *net.UDPConn) error { return setFlags(c, tsFlags) }

// rearm clears the option and sets it again, which sets the kernel's counter to 0.
func rearm(c *net.UDPConn) error {
	if err := setFlags(c, 0); err != nil {
		return err
	}
	return setFlags(c, tsFlags)
}

func setFlags(c *net.UDPConn, flags int) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return fmt.Errorf("reach the clock socket: %w", err)
	}
	var serr error
	if err := raw.Control(func(fd uintptr) {
		serr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_TIMESTAMPING, flags)
	}); err != nil {
		return fmt.Errorf("reach the clock socket: %w", err)
	}
	if serr != nil {
		return fmt.Errorf("turn kernel stamps on: %w", serr)
	}
	return nil
}

// drain reads the error queue until it is empty or each wants no more.
func (k *Socket) drain(each func(id uint32, wallNS int64) (more bool)) error {
	raw, err := k.conn.SyscallConn()
	if err != nil {
		return fmt.Errorf("reach the clock socket: %w", err)
	}
	var oob [512]byte
	var none [1]byte // x/sys asks for the socket's type first when there is no buffer
	var rerr error
	err = raw.Control(func(fd uintptr) {
		for {
			_, oobn, _, _, err := unix.Recvmsg(int(fd), none[:], oob[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				rerr = err
				return
			}
			if id, wall, ok := parseTX(oob[:oobn]); ok && !each(id, wall) {
				return
			}
		}
	})
	if err != nil {
		return fmt.Errorf("reach the clock socket: %w", err)
	}
	if rerr == nil || errors.Is(rerr, unix.EAGAIN) {
		return nil
	}
	return rerr
}

// parseRX finds the software receive stamp among control messages.
func parseRX(oob []byte) (wallNS int64, ok bool) {
	for len(oob) >= unix.SizeofCmsghdr {
		h, data, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			return 0, false
		}
		if ns, ok := stampOf(h, data); ok {
			return ns, true
		}
		oob = rest
	}
	return 0, false
}

// parseTX finds a software send stamp and the number of the send.
func parseTX(oob []byte) (id uint32, wallNS int64, ok bool) {
	var haveID, haveNS bool
	for len(oob) >= unix.SizeofCmsghdr {
		h, data, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			return 0, 0, false
		}
		if ns, ok := stampOf(h, data); ok {
			wallNS, haveNS = ns, true
		}
		v4 := h.Level == unix.SOL_IP && h.Type == unix.IP_RECVERR
		v6 := h.Level == unix.SOL_IPV6 && h.Type == unix.IPV6_RECVERR
		// sock_extended_err: errno u32 | origin u8 | type u8 | code u8 | pad u8 | info u32 | data u32
		if (v4 || v6) && len(data) >= 16 && data[4] == unix.SO_EE_ORIGIN_TIMESTAMPING {
			id, haveID = binary.NativeEndian.Uint32(data[12:]), true
		}
		oob = rest
	}
	return id, wallNS, haveID && haveNS
}

// stampOf reads scm_timestamping: three timespecs, the first is the software stamp.
func stampOf(h unix.Cmsghdr, data []byte) (int64, bool) {
	if h.Level != unix.SOL_SOCKET || h.Type != unix.SO_TIMESTAMPING || len(data) < 16 {
		return 0, false
	}
	sec := int64(binary.NativeEndian.Uint64(data))
	nsec := int64(binary.NativeEndian.Uint64(data[8:]))
	if sec <= 0 || nsec < 0 || nsec >= 1e9 || sec > 1<<33 {
		return 0, false
	}
	return sec*1e9 + nsec, true
}
