package clock

import (
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func ptr[T any](v T) *T { return &v }

func TestPushesAreCheckedBeforeTheyChangeAnything(t *testing.T) {
	s := mustNew(t, Options{})
	epoch := s.ID().Epoch()
	for _, c := range []struct {
		name string
		push Push
		want error
	}{
		{"an offset alone is TensorRT-LLM's push and is taken", Push{Offset: ptr(-12.5)}, nil},
		{"an exact offset with our fields is taken", Push{OffsetNS: ptr(int64(5)), Epoch: epoch, Seq: 9, SkewPPB: 50, BoundNS: ptr(int64(7))}, nil},
		{"the whole clock id serves as epoch", Push{Offset: ptr(1.0), Epoch: string(s.ID()), Seq: 9}, nil},
		{"both offsets that agree are taken", Push{Offset: ptr(1.5), OffsetNS: ptr(int64(1_500_000_000))}, nil},
		{"nothing at all", Push{}, ErrInvalid},
		{"NaN", Push{Offset: ptr(math.NaN())}, ErrInvalid},
		{"infinity", Push{Offset: ptr(math.Inf(1))}, ErrInvalid},
		{"an absurd offset", Push{Offset: ptr(2e9)}, ErrInvalid},
		{"an absurd exact offset", Push{OffsetNS: ptr(int64(math.MaxInt64))}, ErrInvalid},
		{"two offsets that contradict", Push{Offset: ptr(1.0), OffsetNS: ptr(int64(2_000_000_000))}, ErrInvalid},
		{"a negative bound", Push{Offset: ptr(1.0), BoundNS: ptr(int64(-1))}, ErrInvalid},
		{"an absurd skew", Push{Offset: ptr(1.0), SkewPPB: 1e9}, ErrInvalid},
		{"a negative time", Push{Offset: ptr(1.0), VoidAfterNS: -1}, ErrInvalid},
		{"a foreign epoch", Push{Offset: ptr(1.0), Epoch: "0000000000000000"}, ErrForeignEpoch},
		{"the seq that is applied", Push{Offset: ptr(1.0), Seq: 5, Epoch: epoch}, ErrStale},
		{"an older seq", Push{Offset: ptr(1.0), Seq: 4, Epoch: epoch}, ErrStale},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := NewAdjusted(s)
			if err := a.Push(Push{OffsetNS: ptr(int64(77)), Seq: 5, Epoch: epoch}); err != nil {
				t.Fatal(err)
			}
			err := a.Push(c.push)
			if !errors.Is(err, c.want) {
				t.Fatalf("error %v, want %v", err, c.want)
			}
			st := a.State()
			if c.want != nil && (*st.OffsetNS != 77 || st.Seq != 5 || st.Refused != 1) {
				t.Errorf("a refused push left %+v", st)
			}
			if c.want == nil && (*st.OffsetNS == 77 || st.Accepted != 2) {
				t.Errorf("an accepted push left %+v", st)
			}
		})
	}
}

func TestTheOffsetFollowsTheSkewAndEndsWhenVoid(t *testing.T) {
	a := NewAdjusted(mustNew(t, Options{}))
	if _, ok := a.Offset(1); ok {
		t.Error("an offset exists before any push")
	}
	if err := a.Push(Push{OffsetNS: ptr(int64(1000)), AtNS: 1e9, SkewPPB: 50_000, VoidAfterNS: 3e9}); err != nil {
		t.Fatal(err)
	}
	if ns, ok := a.Offset(2e9); !ok || ns != 51_000 {
		t.Errorf("1 s later at 50 ppm: %d %v, want 51000", ns, ok)
	}
	if _, ok := a.Offset(3e9 + 1); ok {
		t.Error("a void offset is still applied")
	}
}

func TestTheHandlerAnswersBothMeanings(t *testing.T) {
	s := mustNew(t, Options{})
	a := NewAdjusted(s)
	h := OffsetHandler(s, a)
	for _, c := range []struct {
		name, method, body string
		status             int
	}{
		{"a push of seconds", "POST", `{"offset": -0.25}`, 200},
		{"NaN as Python writes it", "POST", `{"offset": NaN}`, 400},
		{"infinity as Python writes it", "POST", `{"offset": -Infinity}`, 400},
		{"a number beyond float64", "POST", `{"offset": 1e999}`, 400},
		{"a text for an offset", "POST", `{"offset": "1"}`, 400},
		{"no JSON", "POST", `hello`, 400},
		{"an empty body", "POST", ``, 400},
		{"too long a body", "POST", `{"offset": 1` + strings.Repeat(" ", maxPushBytes) + `}`, 413},
		{"a foreign epoch", "POST", `{"offset": 1, "epoch": "0000000000000000"}`, 409},
		{"another method", "PUT", ``, 405},
		{"a reading", "GET", ``, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(c.method, OffsetPath, strings.NewReader(c.body)))
			if w.Code != c.status {
				t.Errorf("status %d, want %d: %s", w.Code, c.status, w.Body)
			}
		})
	}
	if st := a.State(); *st.OffsetNS != -250_000_000 || st.Accepted != 1 {
		t.Errorf("after one good push among bad ones: %+v", st)
	}
}

func TestAReadingHoldsTheSameStampsInBothUnits(t *testing.T) {
	s := mustNew(t, Options{})
	before := s.Now()
	w := httptest.NewRecorder()
	OffsetHandler(s, NewAdjusted(s)).ServeHTTP(w, httptest.NewRequest(http.MethodGet, OffsetPath, nil))
	after := s.Now()
	var r Reading
	if err := json.Unmarshal(w.Body.Bytes(), &r); err != nil {
		t.Fatalf("%v in %s", err, w.Body)
	}
	if !(before <= *r.ReceiveNS && *r.ReceiveNS <= *r.TransmitNS && *r.TransmitNS <= after) {
		t.Errorf("stamps %d %d outside [%d, %d]", *r.ReceiveNS, *r.TransmitNS, before, after)
	}
	if want := string(AppendSeconds(nil, *r.TransmitNS)); r.TransmitTS.String() != want {
		t.Errorf("transmit_ts %s, want %s", r.TransmitTS, want)
	}
	if r.ClockID != s.ID() || r.Pushed == nil || r.Pushed.OffsetNS != nil {
		t.Errorf("reading %s", w.Body)
	}
}

func TestSecondsAreExact(t *testing.T) {
	for ns, want := range map[int64]string{0: "0.000000000", 1: "0.000000001", 1002545949123456789: "1002545949.123456789", -1_500_000_000: "-1.500000000"} {
		if got := string(AppendSeconds(nil, ns)); got != want {
			t.Errorf("%d ns: %s, want %s", ns, got, want)
		}
	}
}

func FuzzParsePush(f *testing.F) {
	f.Add([]byte(`{"offset": -12.345678901}`))
	f.Add([]byte(`{"offset": -12.345678901, "offset_ns": -12345678901, "at_ns": 5, "skew_ppb": 49812, "bound_ns": 61200, "void_after_ns": 9, "epoch": "9f3c", "seq": 812}`))
	f.Add([]byte(`{"offset": 1e400}`))
	f.Add([]byte(`[]`))
	s := mustNew(f, Options{})
	f.Fuzz(func(t *testing.T, body []byte) {
		p, err := ParsePush(body)
		if err != nil {
			if !errors.Is(err, ErrInvalid) {
				t.Fatalf("undocumented error %v", err)
			}
			return
		}
		p.Epoch, p.Seq = "", 0
		a := NewAdjusted(s)
		if err := a.Push(p); err != nil {
			t.Fatalf("parsed and then refused: %v", err)
		}
		if ns := *a.State().OffsetNS; math.Abs(float64(ns)) > maxOffsetS*1e9+1 {
			t.Fatalf("offset %d ns was accepted", ns)
		}
	})
}
