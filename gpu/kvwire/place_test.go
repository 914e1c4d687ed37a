package kvwire

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// lender attaches KV of prefills, whose blocks are numbered from firstBlock on.
type lender struct {
	mu     sync.Mutex
	fail   error
	opened int
	closed int
}

func (l *lender) attach(s backend.Shared) (backend.Attached, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.opened++
	if l.fail != nil {
		return nil, l.fail
	}
	return &lent{l: l, per: s.TokensPerBlock}, nil
}

func (l *lender) counts() (opened, closed int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.opened, l.closed
}

type lent struct {
	l    *lender
	per  int
	over bool // under l.mu
}

// Pull takes 5 ms, and fails unless the blocks are those that hold the tokens.
func (a *lent) Pull(p backend.Pull) *backend.Copy {
	c := backend.NewCopy()
	a.l.mu.Lock()
	if a.over {
		c.Err = errors.New("pulled after the end")
	}
	a.l.mu.Unlock()
	for t := p.TokenFrom; t < p.TokenTo; t++ {
		if i := t/a.per - p.TokenFrom/a.per; i >= len(p.From) || int(p.From[i]) != firstBlock+t/a.per {
			c.Err = fmt.Errorf("token %d in blocks %v from token %d on", t, p.From, p.TokenFrom)
		}
	}
	go func() {
		time.Sleep(5 * time.Millisecond)
		c.EndNS = int64(5 * time.Millisecond)
		c.Finish()
	}()
	return c
}

func (a *lent) Close() error {
	a.l.mu.Lock()
	defer a.l.mu.Unlock()
	if a.over {
		return errors.New("closed twice")
	}
	a.over = true
	a.l.closed++
	return nil
}

// neighbours is a pair on one host whose sender shares its KV.
func neighbours(t *testing.T, l *lender, sender, receiver Hello) *pair {
	p := start(t, sender, receiver)
	p.server.o.Shared = &backend.Shared{Kind: "test", TokensPerBlock: sender.TokensPerBlock}
	p.server.o.Hello.Shares, p.client.o.Hello.Shares = "test", "test"
	p.server.o.Hello.Clock, p.client.o.Hello.Clock = "00000000000000aa.00000001", "00000000000000aa.00000002"
	p.client.o.Attach = l.attach
	return p
}

// move transfers one prompt of 100 tokens.
func (p *pair) move(t *testing.T, id int64, from int) (*cache, Report) {
	t.Helper()
	o := p.offer(t, id, newPrefill(p.server.o.Hello, 100).run(30))
	o.Ready(someTrailer)
	sink := &cache{h: p.client.o.Hello, got: map[infer.Span][]byte{}}
	_, got, err := p.fetch(t.Context(), id, from, 100, sink)
	if err != nil {
		t.Fatal(err)
	}
	sink.check(t, from, 100)
	<-o.Done()
	if sent, err := o.Result(); err != nil || sent.Bytes != got.Bytes || sent.Tokens != got.Tokens || sent.Frames != got.Frames {
		t.Errorf("the sender reports %+v, %v; the receiver %+v", sent, err, got)
	}
	return sink, got
}

func TestNeighboursCopyInPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lender{}
		p := neighbours(t, l, hello("f32", 16), hello("f32", 32))
		for id, from := range []int{0, 16, 37, 99} {
			sink, got := p.move(t, int64(id), from)
			if sink.pulled != len(sink.got) || sink.pulled == 0 {
				t.Errorf("%d of %d spans came in place", sink.pulled, len(sink.got))
			}
			if want := int64(sink.pulled) * int64(5*time.Millisecond); got.WireNS != want || got.InstallNS != 0 || got.LastByteNS != got.InstalledNS {
				t.Errorf("wire %d ns, install %d ns; want %d and 0: %+v", got.WireNS, got.InstallNS, want, got)
			}
			if want := int64(spanBytes(p.server.o.Hello, infer.Span{LayerTo: 3, TokenFrom: from, TokenTo: 100})); got.Bytes != want {
				t.Errorf("%d bytes, want %d", got.Bytes, want)
			}
		}
		if opened, closed := l.counts(); opened != 1 || closed != 0 {
			t.Errorf("opened %d times, closed %d times; want 1 and 0", opened, closed)
		}
		time.Sleep(time.Minute) // nobody uses it
		if _, closed := l.counts(); closed != 1 {
			t.Error("unused KV of the peer stays open")
		}
		p.move(t, 9, 0)
		p.stop()
		if opened, closed := l.counts(); opened != 2 || closed != 2 {
			t.Errorf("at the end opened %d times, closed %d times; want 2 and 2", opened, closed)
		}
	})
}

func TestKVThatCannotBeReadInPlaceComesByTCP(t *testing.T) {
	for _, tc := range []struct {
		name   string
		edit   func(*pair, *lender)
		opened int
	}{
		{"the system refuses", func(_ *pair, l *lender) { l.fail = errors.New("not permitted") }, 1},
		{"another host", func(p *pair, _ *lender) { p.client.o.Hello.Clock = "00000000000000ab.00000002" }, 0},
		{"no clock", func(p *pair, _ *lender) { p.client.o.Hello.Clock, p.server.o.Hello.Clock = "", "" }, 0},
		{"another kind", func(p *pair, _ *lender) { p.client.o.Hello.Shares = "other" }, 0},
		{"the receiver attaches nothing", func(p *pair, _ *lender) { p.client.o.Attach = nil }, 0},
		{"the sender shares nothing", func(p *pair, _ *lender) { p.server.o.Shared, p.server.o.Hello.Shares = nil, "" }, 0},
		{"the sender says two sizes of a block", func(p *pair, _ *lender) { p.server.o.Shared.TokensPerBlock = 8 }, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			l := &lender{}
			p := neighbours(t, l, hello("f32", 16), hello("f32", 32))
			defer p.stop()
			tc.edit(p, l)
			for id := range int64(3) {
				if sink, _ := p.move(t, id, 0); sink.pulled != 0 {
					t.Errorf("%s: %d spans came in place", tc.name, sink.pulled)
				}
			}
			if opened, _ := l.counts(); opened != tc.opened {
				t.Errorf("%s: tried to open %d times, want %d", tc.name, opened, tc.opened)
			}
		})
	}
}

func TestThePeersEndClosesItsKVAfterTheLastUser(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lender{}
		p := neighbours(t, l, hello("f32", 16), hello("f32", 16))
		x := newPrefill(p.server.o.Hello, 100)
		p.offer(t, 1, x)
		tr, err := p.client.Open(t.Context(), "ctx0", 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := tr.Request(t.Context(), 0, time.Minute); err != nil {
			t.Fatal(err)
		}
		x.spans <- infer.Span{LayerTo: 3, TokenTo: 64}
		failed := make(chan error, 1)
		go func() {
			_, err := tr.Receive(t.Context(), 100, &cache{h: p.client.o.Hello, got: map[infer.Span][]byte{}})
			failed <- err
		}()
		synctest.Wait()
		p.stop() // the sender ends in the middle
		if err := <-failed; err == nil {
			t.Error("half a prompt was taken for a whole one")
		}
		if _, closed := l.counts(); closed != 0 {
			t.Error("closed under a transfer")
		}
		tr.Close()
		if _, closed := l.counts(); closed != 1 {
			t.Errorf("closed %d times, want once", closed)
		}
	})
}

func TestANewProcessBehindAnAddressIsAttachedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lender{}
		p := neighbours(t, l, hello("f32", 16), hello("f32", 16))
		p.move(t, 1, 0)
		next := neighbours(t, &lender{}, hello("f32", 16), hello("f32", 16))
		next.server.o.Epoch = 70
		defer next.stop()
		p.client.mu.Lock()
		p.client.o.Dial = next.ln.dial
		for _, idle := range p.client.idle["ctx0"] {
			_ = idle.conn.Close()
		}
		delete(p.client.idle, "ctx0")
		p.client.mu.Unlock()
		moved := &pair{server: next.server, client: p.client, ln: next.ln}
		if sink, _ := moved.move(t, 2, 0); sink.pulled == 0 {
			t.Error("KV of the new process was not read in place")
		}
		if opened, _ := l.counts(); opened != 2 {
			t.Errorf("opened %d times, want 2", opened)
		}
		p.stop()
		if opened, closed := l.counts(); opened != closed {
			t.Errorf("opened %d times, closed %d times", opened, closed)
		}
	})
}

func TestBlocksThatNobodyAskedForAreRefused(t *testing.T) {
	h := hello("f32", 16)
	tr := &Transfer{c: &Client{o: ClientOptions{Hello: h}}, l: &peerLink{peer: h}, id: 3}
	r := &receiver{t: tr, prompt: 100}
	span := infer.Span{LayerTo: 3, TokenFrom: 10, TokenTo: 40} // of three blocks
	notice, kv := headerOf(TypeWritten, 3, span, h), headerOf(TypeKV, 3, span, h)
	notice.Length, kv.Length = 12, uint32(spanBytes(h, span))
	for _, inPlace := range []bool{false, true} {
		if tr.from = nil; inPlace {
			tr.from = &mapping{}
		}
		if err := r.accept(notice); (err == nil) != inPlace {
			t.Errorf("in place %t: a notice: %v", inPlace, err)
		}
		if err := r.accept(kv); (err == nil) == inPlace {
			t.Errorf("in place %t: KV: %v", inPlace, err)
		}
	}
	notice.Length = 8
	if err := r.accept(notice); err == nil || !strings.Contains(err.Error(), "8 bytes") {
		t.Errorf("a notice without one block: %v", err)
	}
}

func TestALongNoticeIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lender{}
		h := hello("f32", 1)
		p := neighbours(t, l, h, h)
		defer p.stop()
		const prompt = maxBlocks + 10
		x := newPrefill(h, prompt)
		x.spans <- infer.Span{LayerTo: 3, TokenTo: prompt}
		close(x.spans)
		p.offer(t, 1, x).Ready(someTrailer)
		sink := &cache{h: h, got: map[infer.Span][]byte{}}
		if _, _, err := p.fetch(context.Background(), 1, 0, prompt, sink); err != nil {
			t.Fatal(err)
		}
		sink.check(t, 0, prompt)
		if sink.pulled != 2 {
			t.Errorf("%d notices, want 2", sink.pulled)
		}
	})
}

func TestAClientThatIsClosedWhileItAttachesKeepsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &lender{}
		p := neighbours(t, l, hello("f32", 16), hello("f32", 16))
		defer p.stop()
		p.client.o.Attach = func(s backend.Shared) (backend.Attached, error) {
			p.client.Close()
			return l.attach(s)
		}
		tr, err := p.client.Open(t.Context(), "ctx0", 1)
		if err != nil {
			t.Fatal(err)
		}
		defer tr.Close()
		if opened, closed := l.counts(); opened != 1 || closed != 1 {
			t.Errorf("opened %d times, closed %d times; want 1 and 1", opened, closed)
		}
	})
}
