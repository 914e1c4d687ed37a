package web

import (
	"bufio"
	"context"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/labstack/echo/v4"
)

func TestThePageAndItsFiles(t *testing.T) {
	e := echo.New()
	if err := Routes(e, Options{}); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"/": "<title>Meridian", "/web/app.js": "import", "/web/style.css": "color-scheme", "/web/icon.svg": "<svg",
	} {
		w := httptest.NewRecorder()
		e.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		if w.Code != 200 || !strings.Contains(w.Body.String(), want) {
			t.Errorf("%s: %d %.80s", path, w.Code, w.Body)
		}
		if !strings.Contains(w.Header().Get("Content-Security-Policy"), "script-src 'self'") {
			t.Errorf("%s: policy %q", path, w.Header().Get("Content-Security-Policy"))
		}
	}
	w := httptest.NewRecorder()
	e.ServeHTTP(w, httptest.NewRequest("GET", "/web/../web.go", nil))
	if w.Code == 200 {
		t.Error("a file outside the page is served")
	}
}

func TestThePageIsSmallAndWritesNoHTMLOfOthers(t *testing.T) {
	total := 0
	err := fs.WalkDir(files, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := files.ReadFile(path)
		total += len(b)
		for _, bad := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "http://", "https://"} {
			if strings.Contains(strings.ReplaceAll(string(b), "http://www.w3.org/2000/svg", ""), bad) {
				t.Errorf("%s contains %s: text of clients could run, or the page needs something from outside", path, bad)
			}
		}
		return err
	})
	if err != nil || total > 150<<10 {
		t.Errorf("the page is %d bytes, want at most 150 KiB; %v", total, err)
	}
}

// events reads the stream until want of them have come.
func events(t *testing.T, url string, want int) (names []string, data []string) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	sc := bufio.NewScanner(res.Body)
	sc.Buffer(nil, 4<<20)
	for len(data) < want && sc.Scan() {
		if name, ok := strings.CutPrefix(sc.Text(), "event: "); ok {
			names = append(names, name)
		}
		if d, ok := strings.CutPrefix(sc.Text(), "data: "); ok {
			data = append(data, d)
		}
	}
	return names, data
}

func TestAStreamBeginsWithAllAndComesBackWithWhatIsNew(t *testing.T) {
	s := newSite(t, 3)
	names, data := events(t, s.URL+"/live", 4)
	if got := strings.Join(names, " "); got != "clocks cluster windows rows" {
		t.Fatalf("events %s", got)
	}
	if !strings.Contains(data[3], "req-00000") || !strings.Contains(data[3], "req-00002") || !strings.Contains(data[2], `"ttft":[3,`) {
		t.Errorf("windows %s\nrows %s", data[2], data[3])
	}
	_, data = events(t, s.URL+"/live?after=2", 4)
	if strings.Contains(data[3], "req-00001") || !strings.Contains(data[3], "req-00002") {
		t.Errorf("after 2: %s", data[3])
	}
	_, data = events(t, s.URL+"/live?after=99", 4)
	if !strings.Contains(data[3], "req-00000") {
		t.Errorf("a number of another router's life must give all: %s", data[3])
	}
	res, err := http.Get(s.URL + "/live?after=x")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode == 200 {
		t.Error("after=x is taken")
	}
}

func TestAReaderHearsWhatItMissed(t *testing.T) {
	s := newSite(t, keptRows+5)
	rows, lost := s.feed.since(2, 10)
	if lost != 3 || len(rows) != 10 || rows[0].Seq != 6 {
		t.Errorf("lost %d, first %d of %d", lost, rows[0].Seq, len(rows))
	}
	if rows, lost = s.feed.since(keptRows+5, 10); lost != 0 || len(rows) != 0 {
		t.Errorf("nothing is new: lost %d, %d rows", lost, len(rows))
	}
}

func TestWindowsCloseAndAnAmendmentCountsOnce(t *testing.T) {
	now := time.Unix(1000, 0)
	s := newSite(t, 0)
	f := NewFeed(func() time.Time { return now }, nil)
	l, amended := s.line, s.line
	ttft := int64(5_000_000)
	l.TTFTNS, amended.TTFTNS, amended.Amends = &ttft, &ttft, true
	f.Add(&l)
	f.Add(&amended)
	now = now.Add(windowLength)
	f.Add(&l)
	w := f.over(-1)
	if len(w) != 2 || w[0].N != 1 || w[1].N != 1 || w[0].AtMS != 1_000_000 || w[1].AtMS != 1_010_000 {
		t.Fatalf("windows %+v", w)
	}
	if got := w[0].SpanNS[wholeTTFT]; got != (spanNumber{1, ttft, ttft, ttft, ttft, 1}) {
		t.Errorf("ttft %v", got)
	}
	now = now.Add(3*windowLength + time.Second)
	if w = f.over(1_010_000 - 1); len(w) != 2 || w[0].MS != 10_000 || w[1].N != 0 || w[1].AtMS != 1_040_000 || w[1].MS != 1000 {
		t.Fatalf("after a pause the newest window must tell the time: %+v", w)
	}
	for range keptWindows + 10 {
		now = now.Add(windowLength)
		f.Add(&l)
	}
	if n := len(f.over(-1)); n != keptWindows+1 {
		t.Errorf("%d windows are kept, want %d and the running one", n, keptWindows)
	}
}

func TestClocksOfNodesThatLeftAreForgotten(t *testing.T) {
	known := []ClockOf{{Node: "a"}, {Node: "b"}}
	f := NewFeed(time.Now, func() []ClockOf { return known })
	for range keptClocks + 5 {
		f.sample()
	}
	known = known[:1]
	f.sample()
	if h := f.clocksOver(); len(h) != 1 || len(h["a"]) != keptClocks {
		t.Errorf("%d nodes, %d samples", len(h), len(h["a"]))
	}
}
