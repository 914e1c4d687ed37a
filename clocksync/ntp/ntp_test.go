package ntp

import (
	"bytes"
	"errors"
	"testing"
)

// path builds an exchange from what really happened: the server's clock is behind by offset.
type path struct{ offset, fwd, serve, rev int64 }

func (p path) exchange() Exchange {
	const start = 1_000_000
	arrive := start + p.fwd
	leave := arrive + p.serve
	return Exchange{T1: start, T2: arrive - p.offset, T3: leave - p.offset, T4: leave + p.rev}
}

func TestTheOffsetLiesBetweenTheTwoBounds(t *testing.T) {
	for _, c := range []struct {
		name            string
		path            path
		mid, delay      int64
		lowSlack, upper int64 // distance of the truth from each bound
	}{
		{"symmetric delay, no offset", path{0, 50, 10, 50}, 0, 100, 50, 50},
		{"symmetric delay, some offset", path{12345, 50, 10, 50}, 12345, 100, 50, 50},
		{"asymmetric delay errs by half the asymmetry", path{0, 50, 10, 150}, 50, 200, 50, 150},
		{"a negative offset", path{-777, 1, 0, 1}, -777, 2, 1, 1},
		{"the server's own time does not count", path{5, 10, 1_000_000, 10}, 5, 20, 10, 10},
	} {
		t.Run(c.name, func(t *testing.T) {
			e := c.path.exchange()
			if e.Midpoint() != c.mid || e.Delay() != c.delay || !e.Possible(0) {
				t.Errorf("midpoint %d delay %d possible %v", e.Midpoint(), e.Delay(), e.Possible(0))
			}
			if c.path.offset-e.Lower() != c.lowSlack || e.Upper()-c.path.offset != c.upper {
				t.Errorf("bounds [%d, %d] around %d", e.Lower(), e.Upper(), c.path.offset)
			}
			e.ErrNS = 7
			if c.path.offset-e.Lower() != c.lowSlack+7 || e.Upper()-c.path.offset != c.upper+7 {
				t.Errorf("with 7 ns of error: bounds [%d, %d]", e.Lower(), e.Upper())
			}
		})
	}
}

func TestImpossibleStampsAreSeen(t *testing.T) {
	for name, e := range map[string]Exchange{
		"the reply came before the request": {T1: 10, T2: 0, T3: 0, T4: 9},
		"the server sent before it got":     {T1: 0, T2: 10, T3: 9, T4: 20},
		"the server took longer than all":   {T1: 0, T2: 0, T3: 100, T4: 50},
	} {
		if e.Possible(0) {
			t.Errorf("%s: taken as possible", name)
		}
	}
	if e := (Exchange{T1: 0, T2: 0, T3: 52, T4: 50, ErrNS: 1}); !e.Possible(0) {
		t.Error("an impossibility within the errors is no lie")
	}
	// The server holds the exchange for a second, and its clock runs fast by 50 ppm: its own time looks too long.
	held := Exchange{T1: 0, T2: 100, T3: 1_000_050_100, T4: 1_000_000_200}
	if held.Possible(0) || held.Possible(40e-6) || !held.Possible(60e-6) {
		t.Error("a held exchange is judged without the drift meanwhile")
	}
}

func fullReply() Packet {
	return Packet{Reply: true, KernelRX: true, HasPrevTX: true, HasPair: true, Seq: 0xfffffffe, Epoch: 0xfedcba9876543210, Instance: 0xdeadbeef,
		ErrNS: 65535, PairErrNS: 777, T2: 1 << 62, T3: 1<<62 + 5, PrevTX: -3, RawDiffNS: 259_603_000}
}

func TestPacketsSurviveARoundTrip(t *testing.T) {
	for name, p := range map[string]Packet{
		"a reply":   fullReply(),
		"a request": {Seq: 5, PrevSeq: 0xffffffff, Epoch: 9, Instance: 8},
	} {
		for _, key := range [][]byte{nil, []byte("secret")} {
			b := p.Append(nil, key)
			got, err := ParsePacket(b, key)
			if err != nil || got != p || len(b) != Size {
				t.Errorf("%s, key %q: %+v %v (%d bytes), want %+v", name, key, got, err, len(b), p)
			}
		}
	}
}

func TestForeignPacketsAreRefused(t *testing.T) {
	key := []byte("secret")
	good := fullReply().Append(nil, nil)
	edit := func(at int, v byte) []byte {
		b := bytes.Clone(good)
		b[at] = v
		return b
	}
	request := Packet{Seq: 1}.Append(nil, nil)
	request[35] = 1
	for _, c := range []struct {
		name string
		in   []byte
		key  []byte
		want error
	}{
		{"empty", nil, nil, ErrPacket},
		{"short", good[:63], nil, ErrPacket},
		{"long", append(bytes.Clone(good), 0), nil, ErrPacket},
		{"wrong magic", edit(0, 0), nil, ErrPacket},
		{"wrong version", edit(2, 9), nil, ErrPacket},
		{"unknown flag", edit(3, 0x80), nil, ErrPacket},
		{"a request with stamps", request, nil, ErrPacket},
		{"unsigned where a key is needed", good, key, ErrMAC},
		{"signed where no key is known", fullReply().Append(nil, key), nil, ErrMAC},
		{"signed by another key", fullReply().Append(nil, []byte("other")), key, ErrMAC},
	} {
		if _, err := ParsePacket(c.in, c.key); !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", c.name, err, c.want)
		}
	}
	signed := fullReply().Append(nil, key)
	for i := range signed {
		b := bytes.Clone(signed)
		b[i] ^= 1
		if _, err := ParsePacket(b, key); err == nil {
			t.Errorf("a signed packet with byte %d changed was accepted", i)
		}
	}
}

func FuzzParsePacket(f *testing.F) {
	f.Add(fullReply().Append(nil, nil), []byte(nil))
	f.Add(Packet{Seq: 1, PrevSeq: 2}.Append(nil, []byte("k")), []byte("k"))
	f.Add([]byte("short"), []byte(nil))
	f.Fuzz(func(t *testing.T, in, key []byte) {
		p, err := ParsePacket(in, key)
		if err != nil {
			if !errors.Is(err, ErrPacket) && !errors.Is(err, ErrMAC) {
				t.Fatalf("undocumented error %v", err)
			}
			return
		}
		again, err := ParsePacket(p.Append(nil, key), key)
		if err != nil || again != p {
			t.Fatalf("round trip of %+v gave %+v %v", p, again, err)
		}
	})
}
