package routerbench

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"meridian.internal/e2e/cluster"
	"meridian.internal/shared/clock"
)

func TestPercentilesAreByNearestRank(t *testing.T) {
	hundred := make([]int64, 100)
	for i := range hundred {
		hundred[i] = int64(i + 1)
	}
	for _, c := range []struct {
		values []int64
		q      float64
		want   float64
	}{{hundred, 0.99, 99}, {hundred, 0.5, 50}, {hundred, 1, 100}, {hundred, 0, 1}, {[]int64{3, 9}, 0.5, 3}, {[]int64{3, 9}, 0.99, 9}, {nil, 0.5, 0}} {
		if got := percentile(c.values, c.q); got != c.want {
			t.Errorf("p%g of %d values is %v, want %v", 100*c.q, len(c.values), got, c.want)
		}
	}
}

func TestAPlanThatMeasuresNothingIsRefused(t *testing.T) {
	good := Plan{Rounds: 1, Turn: time.Second, Streams: 1, Leaves: 1, Only: OnlyHeld, Against: []string{"direct", "nginx", "reverseproxy", "naive"}}
	if err := good.Check(); err != nil {
		t.Fatal(err)
	}
	for option, change := range map[string]func(*Plan){
		"--rounds": func(p *Plan) { p.Rounds = 0 }, "--turn": func(p *Plan) { p.Turn = 0 }, "--streams": func(p *Plan) { p.Streams = 0 },
		"--leaves": func(p *Plan) { p.Leaves = 0 }, "--only": func(p *Plan) { p.Only = "t1" }, "--against": func(p *Plan) { p.Against = []string{"ngnix"} },
	} {
		p := good
		change(&p)
		if _, err := Run(t.Context(), p); err == nil || !strings.Contains(err.Error(), option) {
			t.Errorf("%s: %v", option, err)
		}
	}
}

// TestBenchProducesEveryRow runs a short form of the whole: the answers must be right, and every row must have a value.
// What the values are is nobody's business here: the machine is busy with other tests.
func TestBenchProducesEveryRow(t *testing.T) {
	if os.Getenv("MERIDIAN_TEST_BIN") == "" {
		t.Setenv("MERIDIAN_TEST_BIN", absolute(t, "../../bin"))
	}
	bin, err := cluster.Binaries()
	if err != nil {
		t.Skip("the binaries are not built: make build")
	}
	self := filepath.Join(t.TempDir(), "routerbench")
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", self, "../cmd/routerbench").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	res, err := Run(ctx, Plan{
		Bench: Bench{Self: self, Router: filepath.Join(bin, "router"), Dir: t.TempDir()}, Rounds: 1, Turn: 200 * time.Millisecond,
		Streams: 30, Leaves: 3, Log: io.Discard,
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range res.Failures {
		t.Error(f)
	}
	if len(res.Lines) != len(rows()) {
		t.Errorf("%d rows of %d", len(res.Lines), len(rows()))
	}
	for _, l := range res.Lines {
		for _, name := range []string{"naive", "ours"} {
			if c, ok := l.Cells[name]; !ok || math.IsNaN(c.Value) || math.IsNaN(c.Compared) {
				t.Errorf("%s of %s has no value", l.title, name)
			}
		}
	}
	var out bytes.Buffer
	if err := res.Write(&out); err != nil {
		t.Fatal(err)
	}
	for name, why := range res.Skipped {
		t.Logf("%s: %s", name, why)
		if !strings.Contains(out.String(), why) {
			t.Errorf("the report does not say that %s", why)
		}
	}
}

func absolute(t *testing.T, path string) string {
	t.Helper()
	p, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestRowsCompareWithinTheirRound(t *testing.T) {
	value := func(s *sample) float64 { return float64(s.requests) }
	turns := func(n ...int) (out []*sample) {
		for _, v := range n {
			out = append(out, &sample{requests: v})
		}
		return out
	}
	samples := map[string]map[string][]*sample{"l": {"naive": turns(10, 100, 10), "direct": turns(1, 2, 3), "ours": turns(20, 300, 15)}}
	for _, c := range []struct {
		name    string
		compare comparison
		want    float64
	}{
		{"ratios are of the same round, the median is of ratios", toNaive, 2},
		{"what is added is over direct of the same round", added, 19},
		{"a plain row is its value", plain, 20},
	} {
		got := row{load: "l", value: value, compare: c.compare}.cells(samples)["ours"]
		if got.Compared != c.want || got.Value != 20 {
			t.Errorf("%s: %+v, want %v of 20", c.name, got, c.want)
		}
	}
}

func TestMet(t *testing.T) {
	least, most := row{goal: 2, least: true}, row{goal: 2}
	for _, c := range []struct {
		r    row
		v    float64
		want bool
	}{{least, 2, true}, {least, 1.9, false}, {most, 2, true}, {most, 2.1, false}, {most, math.NaN(), false}, {least, math.NaN(), false}} {
		if c.r.met(c.v) != c.want {
			t.Errorf("goal %s, %v: met %t", Line{row: c.r}.goalText(), c.v, !c.want)
		}
	}
}

// answerOf is a stream of tokens as the mock worker writes it.
func answerOf(tokens int) []byte {
	out := []byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
	for i := range tokens {
		out = appendToken(out, i, i == tokens-1, 7)
	}
	return appendEnd(out, tokens, true)
}

// oneByte gives a byte with each read, so that every border of a piece is met.
type oneByte struct{ r io.Reader }

func (o oneByte) Read(p []byte) (int, error) { return o.r.Read(p[:1]) }

func TestPlayerChecksTheAnswer(t *testing.T) {
	good := answerOf(3)
	cut := good[:len(good)-30]
	twice := bytes.Replace(good, []byte(`"w1.`), []byte(`"w0.`), 1)
	for _, c := range []struct {
		name   string
		answer []byte
		ok     bool
	}{
		{"the whole answer", good, true},
		{"an end before the end mark", cut, false},
		{"a token twice", twice, false},
		{"a token too few", answerOf(2), false},
		{"an error", []byte("HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno"), false},
		{"nothing", nil, false},
	} {
		for _, r := range []io.Reader{bytes.NewReader(c.answer), oneByte{bytes.NewReader(c.answer)}} {
			p := &player{Conn: discard{}, r: bufio.NewReaderSize(r, readBuffer)}
			if err := p.play(nil, 3); (err == nil) != c.ok {
				t.Errorf("%s: %v", c.name, err)
			}
		}
	}
}

func TestASubjectThatHangsFailsItsTurn(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // it accepts in the kernel, and nobody answers
	steady, err := clock.New(clock.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var got sample
	hung := turn{load: loads()[0], subject: &subject{addr: l.Addr().String()}, steady: steady, to: math.MaxInt64, by: time.Now().Add(50 * time.Millisecond)}
	hung.loop(t.Context(), &got)
	if got.failed != 1 || !errors.Is(got.err, os.ErrDeadlineExceeded) {
		t.Errorf("%d failed: %v", got.failed, got.err)
	}
}

func FuzzAnswer(f *testing.F) {
	f.Add(answerOf(2))
	f.Add([]byte("HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"))
	f.Add([]byte("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		p := &player{Conn: discard{}, r: bufio.NewReaderSize(bytes.NewReader(b), readBuffer)}
		if err := p.play(nil, 2); err == nil && (p.seen != 2 || !p.done) {
			t.Errorf("%d tokens, end %t were taken for an answer of 2", p.seen, p.done)
		}
	})
}

// discard is a connection that nobody reads from; writes go nowhere.
type discard struct{ net.Conn }

func (discard) Write(p []byte) (int, error) { return len(p), nil }
