package kernel

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"meridian.internal/shared/clock"
)

func steady(t testing.TB) *clock.Steady {
	t.Helper()
	s, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func witness(t testing.TB, dir string, s *clock.Steady) *Witness {
	t.Helper()
	w := Listen(dir, s, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = w.Serve(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return w
}

func TestProcessesOfOneKernelProveItToEachOther(t *testing.T) {
	a, b, dir := steady(t), steady(t), t.TempDir()
	witness(t, dir, b)
	p, err := Prove(t.Context(), dir, a.ID(), b.ID())
	for end := time.Now().Add(time.Minute); errors.Is(err, os.ErrDeadlineExceeded) && time.Now().Before(end); {
		p, err = Prove(t.Context(), dir, a.ID(), b.ID()) // the witness had no processor
	}
	if err != nil || p.How != "abstract" || p.AnchorErrNS != b.AnchorErrNS() {
		t.Errorf("proof %+v, %v", p, err)
	}
}

// short is a listener whose first connection finds no descriptor.
type short struct {
	net.Listener
	failed bool
}

func (s *short) Accept() (net.Conn, error) {
	if !s.failed {
		s.failed = true
		return nil, syscall.EMFILE
	}
	return s.Listener.Accept()
}

func TestAProcessThatLackedADescriptorBearsWitnessLater(t *testing.T) {
	b := steady(t)
	l, err := net.Listen("unix", addresses("", b.ID())[0])
	if err != nil {
		t.Skip("no abstract sockets: " + err.Error())
	}
	w := &Witness{steady: b, log: slog.New(slog.DiscardHandler), ls: []net.Listener{&short{Listener: l}}}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- w.Serve(ctx) }()
	t.Cleanup(func() { cancel(); <-served })
	for {
		_, err := Prove(t.Context(), "", steady(t).ID(), b.ID())
		if err == nil {
			return
		}
		select {
		case err := <-served:
			served <- err
			t.Fatal("it no longer bears witness")
		default: // it had no processor
		}
	}
}

func TestASharedFolderProvesItWithoutACommonNetwork(t *testing.T) {
	b, dir := steady(t), t.TempDir()
	witness(t, dir, b)
	anchor, err := ask(t.Context(), addresses(dir, b.ID())[1], b.ID())
	if err != nil || anchor != b.AnchorErrNS() {
		t.Errorf("anchor %d, %v", anchor, err)
	}
}

func TestNothingIsProvenOfStrangers(t *testing.T) {
	a, b := steady(t), steady(t)
	witness(t, "", b)
	own := a.ID()
	for name, peer := range map[string]clock.ID{
		"a process that is not here": clock.ID(own.Epoch() + ".00000000"),
		"another epoch":              clock.ID("0000000000000000." + b.ID().Instance()),
		"no id":                      "",
	} {
		if p, err := Prove(t.Context(), "", own, peer); !errors.Is(err, ErrNotProven) {
			t.Errorf("%s: %+v %v", name, p, err)
		}
	}
}

func TestASocketThatAnswersAsAnotherClockProvesNothing(t *testing.T) {
	a, b, other := steady(t), steady(t), steady(t)
	l, err := net.Listen("unix", addresses("", b.ID())[0])
	if err != nil {
		t.Skip("no abstract unix sockets here: ", err)
	}
	w := &Witness{steady: other, log: slog.New(slog.DiscardHandler), ls: []net.Listener{l}}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = w.Serve(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	if p, err := Prove(t.Context(), "", a.ID(), b.ID()); !errors.Is(err, ErrNotProven) {
		t.Errorf("%+v %v", p, err)
	}
}

func FuzzParseProof(f *testing.F) {
	f.Add("meridian-clock 0123456789abcdef.01234567 155\n")
	f.Add("meridian-clock x -1\n")
	f.Add("")
	f.Fuzz(func(t *testing.T, line string) {
		id, anchor, err := parseProof(line)
		if err != nil {
			return
		}
		if _, err := clock.ParseID(string(id)); err != nil || anchor < 0 || anchor > maxAnchor {
			t.Fatalf("%q gave %q %d", line, id, anchor)
		}
	})
}
