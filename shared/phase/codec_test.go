package phase

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"meridian.internal/shared/infer"
)

var update = flag.Bool("update", false, "write the golden files")

// fill puts a different value into every field.
func fill(v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).Tag.Get("json") != "-" { // it says that another is null
				fill(v.Field(i), n)
			}
		}
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), n)
		fill(v.Index(1), n)
	case reflect.String:
		v.SetString(fmt.Sprintf("text %d \"é\u2028\xff", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(int64(*n) << 16)
	case reflect.Float64:
		v.SetFloat(float64(*n) + 0.25)
	default:
		panic("unknown kind " + v.Kind().String())
	}
}

func full() *Record {
	r, n := new(Record), 0
	fill(reflect.ValueOf(r).Elem(), &n)
	r.Schema = Schema
	r.Stamps.Clock, r.Stamps.EngineClock = 1, 1
	return r
}

func ptr[T any](v T) *T { return &v }

// typical is a ctx node's record as production writes it.
func typical() *Record {
	t0 := int64(123456789012345)
	at := func(us int64) *int64 { return ptr(t0 + us*1000) }
	return &Record{
		Schema: Schema, Role: Ctx, Node: "ctx0", Instance: "5a72a6b7c93ab5e1.80ef1c63", Router: "router0", RequestID: "r-0198c2f4b7",
		DisaggRequestID: 1450704281600000, Style: "generation_first", Model: "meridian-tiny", Streamed: true, Outcome: Finished,
		FinishReason: "length", Clocks: []Clock{{ID: "5a72a6b7c93ab5e1.80ef1c63", Kind: "mono"}}, Iters: &Iters{812, 815},
		Stamps: Stamps{ReceiveNS: at(0), ParsedNS: at(85), AdmittedNS: at(90), QueuedNS: at(92), FirstScheduledNS: at(140), FirstTokenNS: at(9000), EndNS: at(9300)},
		Tokens: Tokens{Prompt: 700, Cached: 128, Output: 1}, KV: &infer.KVCounts{AllocTotalBlocks: 22, AllocNewBlocks: 18, ReusedBlocks: 4, MissedBlocks: 18},
		Transfer: &Transfer{Peer: "gen0", Bytes: 1 << 20, Frames: 40, Tokens: 572, TokensHeld: 128, RequestedNS: at(20), StartNS: at(2500), LastByteNS: at(9100), InstalledNS: at(9250), WireNS: 400000, InstallNS: 0},
		Chunks: []infer.Chunk{{Iter: 812, Tokens: 256, KVTokens: 128, BatchSize: 1, ForwardStartNS: t0 + 150000, ForwardEndNS: t0 + 4000000, SampleEndNS: t0 + 4000000},
			{Iter: 813, Tokens: 316, KVTokens: 384, BatchSize: 2, ForwardStartNS: t0 + 4100000, ForwardEndNS: t0 + 8900000, SampleEndNS: t0 + 8990000}},
	}
}

func stdlib(t testing.TB, r *Record) string {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(r); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSuffix(b.String(), "\n")
}

func TestAppendEqualsEncodingJSON(t *testing.T) {
	for name, r := range map[string]*Record{"full": full(), "empty": {}, "typical": typical()} {
		if got, want := string(Append(nil, r)), stdlib(t, r); got != want {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
		}
	}
}

func TestARecordWithADifferentValueInEveryFieldSurvivesARoundTrip(t *testing.T) {
	r := full()
	got, err := Parse(Append(nil, r))
	if err != nil {
		t.Fatal(err)
	}
	want := new(Record) // what encoding/json makes of it: bad UTF-8 is replaced
	if err := json.Unmarshal([]byte(stdlib(t, r)), want); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s\nwant\n%s", stdlib(t, got), stdlib(t, want))
	}
}

func TestTokensThatAreNotKnownAreNull(t *testing.T) {
	for want, tokens := range map[string]Tokens{
		`"tokens":{"prompt":null,"cached":null,"output":3}`: {Output: 3, NoPrompt: true, NoCached: true},
		`"tokens":{"prompt":7,"cached":null,"output":3}`:    {Prompt: 7, Output: 3, NoCached: true},
		`"tokens":{"prompt":0,"cached":0,"output":0}`:       {},
	} {
		text := Append(nil, &Record{Schema: Schema, Tokens: tokens})
		if !bytes.Contains(text, []byte(want)) {
			t.Errorf("%s, want %s", text, want)
		}
		if r, err := Parse(text); err != nil || r.Tokens != tokens {
			t.Errorf("%+v became %+v, %v", tokens, r.Tokens, err)
		}
	}
}

func TestStampsListsEveryStampOfTheType(t *testing.T) {
	var s Stamps
	all, v := s.All(), reflect.ValueOf(&s).Elem()
	at := 0
	for i := range v.NumField() {
		if v.Field(i).Kind() != reflect.Pointer {
			continue
		}
		name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
		if at == len(all) || all[at].Name != name || reflect.ValueOf(all[at].NS).Pointer() != v.Field(i).Addr().Pointer() {
			t.Fatalf("field %d: %s is not entry %d of All", i, name, at)
		}
		at++
	}
	if at != len(all) {
		t.Errorf("All has %d entries, the type %d stamps", len(all), at)
	}
}

func TestGolden(t *testing.T) {
	for name, r := range map[string]*Record{"full": full(), "ctx": typical()} {
		path := filepath.Join("testdata", name+".json")
		got := append(Append(nil, r), '\n')
		if *update {
			os.MkdirAll("testdata", 0o755)
			os.WriteFile(path, got, 0o644)
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s:\n%s\nwant\n%s", path, got, want)
		}
	}
}

func TestParseReportsWhatIsWrong(t *testing.T) {
	cases := []struct {
		name, text string
		want       error
	}{
		{"no object", `[]`, ErrBadRecord},
		{"nothing", ``, ErrBadRecord},
		{"cut off", `{"schema":"meridian.phase/1","role":"c`, ErrBadRecord},
		{"a text where a number belongs", `{"schema":"meridian.phase/1","sub":"x"}`, ErrBadRecord},
		{"a number that is too large", `{"schema":"meridian.phase/1","stamps":{"end_ns":99999999999999999999}}`, ErrBadRecord},
		{"a clock that the table lacks", `{"schema":"meridian.phase/1","stamps":{"clock":7}}`, ErrBadRecord},
		{"another schema", `{"schema":"meridian.phase/2"}`, ErrSchema},
		{"no schema", `{}`, ErrSchema},
	}
	for _, c := range cases {
		if _, err := Parse([]byte(c.text)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

func TestParseSkipsUnknownMembersAndKeepsNullApartFromZero(t *testing.T) {
	r, err := Parse([]byte(`{"schema":"meridian.phase/1","later":{"x":[1,{}]},"stamps":{"receive_ns":0,"end_ns":null,"soon_ns":5},"disagg_request_id":9007199254740993}`))
	if err != nil {
		t.Fatal(err)
	}
	if r.Stamps.ReceiveNS == nil || *r.Stamps.ReceiveNS != 0 || r.Stamps.EndNS != nil || r.DisaggRequestID != 9007199254740993 {
		t.Errorf("%+v", r)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(Append(nil, full()))
	f.Add(Append(nil, typical()))
	f.Add([]byte(`{"schema":"meridian.phase/1"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Parse(b)
		if err != nil {
			if !errors.Is(err, ErrBadRecord) && !errors.Is(err, ErrSchema) {
				t.Fatalf("undocumented error %v", err)
			}
			return
		}
		again, err := Parse(Append(nil, r))
		if err != nil || stdlib(t, again) != stdlib(t, r) {
			t.Errorf("no round trip (%v):\n%s\n%s", err, stdlib(t, r), Append(nil, r))
		}
	})
}

// someSteps makes records of n steps with different values in every field: pages of 64 rows, in runs of 9 with a row of
// another request between them, and steps that compute five tokens anew, of so many stages.
func someSteps(n, stages int) (*infer.StepRecords, *infer.Steps) {
	rec, s := &infer.StepRecords{N: n, Truncated: 3}, &infer.Steps{Truncated: 3}
	if stages > 1 {
		s.StageNS = make([][]int64, 2*(stages-1))
	}
	var p infer.StepPage
	for i, k := 0, 0; k < n; i++ {
		at := int64(123456789012345 + 2000000*i)
		row := infer.StepRow{Iter: int64(900 + i), ForwardStartNS: at, ForwardEndNS: at + int64(i%7)*1000, SampleEndNS: at - 5, TokenNS: -at, BatchSize: int64(1 + i%3)}
		for cut := range s.StageNS {
			row.StageNS = append(row.StageNS, at+int64(cut*cut*1000+i%5))
		}
		p.Append(row)
		if i%10 != 4 {
			s.Step, s.KVTokens, s.Tokens = append(s.Step, int32(k)), append(s.KVTokens, int32(700+k)), append(s.Tokens, 1+4*int32(i%10/9))
			s.Iter, s.TokenNS, s.BatchSize = append(s.Iter, row.Iter), append(s.TokenNS, row.TokenNS), append(s.BatchSize, int32(row.BatchSize))
			s.ForwardStartNS, s.ForwardEndNS, s.SampleEndNS = append(s.ForwardStartNS, row.ForwardStartNS), append(s.ForwardEndNS, row.ForwardEndNS), append(s.SampleEndNS, row.SampleEndNS)
			for cut, ns := range row.StageNS {
				s.StageNS[cut] = append(s.StageNS[cut], ns)
			}
			run := infer.StepRun{From: int32(p.Rows - 1), N: 1, Step: int32(k), KVTokens: int32(700 + k), Tokens: s.Tokens[k]}
			if j := len(p.Runs) - 1; j >= 0 && p.Runs[j].From+p.Runs[j].N == run.From && p.Runs[j].Tokens == run.Tokens {
				p.Runs[j].N++
			} else {
				p.Runs = append(p.Runs, run)
			}
			k++
		}
		if p.Rows == 64 || k == n {
			rec.Pages, p = append(rec.Pages, p), infer.StepPage{}
		}
	}
	return rec, s
}

func TestStepsSurviveARoundTripInPartsThatFit(t *testing.T) {
	rec := typical()
	for _, c := range []struct{ n, stages int }{{1, 0}, {2, 0}, {64, 0}, {65, 0}, {10000, 0}, {40000, 0}, {1, 2}, {65, 4}, {10000, 4}} {
		n := c.n
		packed, want := someSteps(n, c.stages)
		got := new(infer.Steps)
		parts := AppendSteps(rec, packed)
		if (len(parts) > 1) != (n >= 10000) {
			t.Errorf("%d steps: %d messages", n, len(parts))
		}
		for i, p := range parts {
			h, s, err := ParseSteps(p)
			if err != nil || len(p) > MaxStepMessage {
				t.Fatalf("%d steps, part %d of %d bytes: %v", n, i, len(p), err)
			}
			if h.Part != i || h.Parts != len(parts) || h.RequestID != rec.RequestID || h.Node != rec.Node || h.Instance != rec.Instance || h.Role != rec.Role || h.Stages != c.stages {
				t.Errorf("header %+v", h)
			}
			got.Join(s)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%d steps differ after the round trip", n)
		}
	}
	if AppendSteps(rec, nil) != nil || AppendSteps(rec, &infer.StepRecords{}) != nil {
		t.Error("no steps make a message")
	}
}

func FuzzParseSteps(f *testing.F) {
	for _, stages := range []int{0, 2, 4} {
		some, _ := someSteps(3, stages)
		f.Add(AppendSteps(typical(), some)[0])
	}
	f.Add([]byte(stepMagic + "\xff\xff\xff\xff\x0f"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, _, err := ParseSteps(b); err != nil && !errors.Is(err, ErrBadSteps) && !errors.Is(err, ErrSchema) {
			t.Fatalf("undocumented error %v", err)
		}
	})
}

func BenchmarkAppend(b *testing.B) {
	r := typical()
	b.Run("ours", func(b *testing.B) {
		var buf []byte
		for b.Loop() {
			buf = Append(buf[:0], r)
		}
		b.SetBytes(int64(len(buf)))
	})
	b.Run("encoding_json", func(b *testing.B) {
		for b.Loop() {
			json.Marshal(r)
		}
	})
}

func BenchmarkParse(b *testing.B) {
	text := Append(nil, typical())
	b.Run("ours", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		for b.Loop() {
			Parse(text)
		}
	})
	b.Run("encoding_json", func(b *testing.B) {
		for b.Loop() {
			json.Unmarshal(text, new(Record))
		}
	})
}

func BenchmarkAppendSteps(b *testing.B) {
	const steps = 400
	rec := typical()
	s, _ := someSteps(steps, 0)
	b.ReportAllocs()
	for b.Loop() {
		AppendSteps(rec, s)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/steps, "ns/step")
}
