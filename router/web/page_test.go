package web

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/labstack/echo/v4"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

// hostile is an id as an attacker would choose it: it must be seen as text, and never run.
const hostile = `<img src=x onerror="document.title='run'">`

// site is a router's page without a router behind it: a feed with many requests, two nodes, one timeline.
type site struct {
	*httptest.Server
	feed    *Feed
	kv      *KV
	line    timeline.Line
	clockID string       // of the router's process
	later   atomic.Int64 // by how much the feed's clock is ahead, ns
	told    atomic.Int64 // times that the nodes were told to a page, each before its windows
}

func newSite(t *testing.T, requests int) *site {
	golden, err := os.ReadFile("../timeline/testdata/generation_first.json")
	if err != nil {
		t.Fatal(err)
	}
	l, err := timeline.Parse(golden)
	if err != nil {
		t.Fatal(err)
	}
	offset, bound := int64(-2_345_678), int64(1_234)
	s := &site{line: *l, clockID: "a.b", kv: NewKV(nil, nil)}
	s.feed = NewFeed(func() time.Time { return time.Now().Add(time.Duration(s.later.Load())) }, func() []ClockOf {
		return []ClockOf{{Node: "ctx0", OffsetNS: &offset, BoundNS: &bound}, {Node: "gen0"}}
	})
	for i := range requests {
		s.request(i)
	}
	s.Server = httptest.NewServer(s.routes(t))
	t.Cleanup(func() { s.Close() })
	return s
}

// again starts the site's router anew: at the same address, with the requests of before.
func (s *site) again(t *testing.T) {
	t.Helper()
	addr := s.Listener.Addr().String()
	_ = s.Listener.Close() // first: the page comes back while what it has is cut
	s.CloseClientConnections()
	s.Close()
	s.clockID = "c.d"
	l, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	s.Server = &httptest.Server{Listener: l, Config: &http.Server{Handler: s.routes(t)}}
	s.Start()
}

func (s *site) routes(t *testing.T) http.Handler {
	t.Helper()
	e := echo.New()
	cluster := func() any {
		s.told.Add(1)
		return json.RawMessage(`{"router":"router0","clock_id":"` + s.clockID + `","schedule":"auto","nodes":[
		{"name":"ctx0","role":"ctx","url":"http://c","state":"ready","load":{"running":3,"waiting":1,"waiting_tokens":900,"kv_used_blocks":40,"kv_max_blocks":100,"age_ns":210000000},"clock":{"offset_ns":-2345678,"bound_ns":1234,"state":"synced"}},
		{"name":"gen0","role":"gen","url":"http://g","state":"draining","load":null,"clock":{"offset_ns":null,"bound_ns":null,"state":"not_aligned"}},
		{"name":"gen1","role":"gen","url":"http://h","state":"ready","stages":4,"load":{"running":9,"waiting":2,"waiting_tokens":10,"kv_used_blocks":70,"kv_max_blocks":200,"age_ns":90000000},"clock":{"offset_ns":-5,"bound_ns":1234,"state":"synced"},
		"ranks":[{"dp_rank":0,"running":7,"waiting":2,"kv_used_blocks":60,"kv_max_blocks":100},{"dp_rank":1,"running":2,"waiting":0,"kv_used_blocks":10,"kv_max_blocks":100}]}]}`)
	}
	if err := Routes(e, Options{Feed: s.feed, KV: s.kv, Cluster: cluster, Draining: func() bool { return false }}); err != nil {
		t.Fatal(err)
	}
	e.GET("/timelines/:id", func(c echo.Context) error {
		line := s.line
		line.RequestID = c.Param("id")
		if line.RequestID == "unknown" {
			return echo.ErrNotFound
		}
		line.ClientRequestID = hostile
		return c.JSONBlob(200, timeline.Append(nil, &line))
	})
	return e
}

// request adds the i-th request; the times differ, so that a filter finds some of them.
func (s *site) request(i int) {
	l := s.line
	l.RequestID = fmt.Sprintf("req-%05d", i)
	l.ClientRequestID = ""
	if i%10 == 0 {
		l.ClientRequestID = hostile
	}
	if i%7 == 0 {
		l.Outcome = phase.Outcome("failed")
	}
	ttft := int64(1_000_000) * int64(1+i%90)
	l.TTFTNS = &ttft
	s.feed.Add(&l)
}

// browser opens a tab in a real Chromium; what the page complains about ends in complaints.
type browser struct {
	context.Context
	mu         sync.Mutex
	complaints []string
	bytes      float64
}

// patience is how long a step of the browser may take on a loaded machine.
const patience = 2 * time.Minute

func newBrowser(t *testing.T) *browser {
	var path string
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "headless-shell"} {
		if p, err := exec.LookPath(name); err == nil {
			path = p
			break
		}
	}
	if path == "" {
		t.Skip("no Chromium is installed")
	}
	alloc, stop := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.WSURLReadTimeout(patience))...)
	t.Cleanup(stop)
	ctx, cancel := chromedp.NewContext(alloc, chromedp.WithBrowserOption(chromedp.WithDialTimeout(patience)))
	t.Cleanup(cancel)
	ctx, over := context.WithTimeout(ctx, 2*patience)
	t.Cleanup(over)
	b := &browser{Context: ctx}
	chromedp.ListenTarget(ctx, func(ev any) {
		b.mu.Lock()
		defer b.mu.Unlock()
		switch ev := ev.(type) {
		case *runtime.EventExceptionThrown:
			b.complaints = append(b.complaints, ev.ExceptionDetails.Error())
		case *log.EventEntryAdded:
			if ev.Entry.Level == log.LevelError && !strings.Contains(ev.Entry.URL, "/timelines/unknown") {
				b.complaints = append(b.complaints, ev.Entry.Text+" "+ev.Entry.URL)
			}
		case *network.EventLoadingFinished:
			b.bytes += ev.EncodedDataLength
		}
	})
	b.do(t, log.Enable(), network.Enable(), runtime.Enable())
	return b
}

func (b *browser) do(t *testing.T, actions ...chromedp.Action) {
	t.Helper()
	if err := chromedp.Run(b, actions...); err != nil {
		t.Fatal(err)
	}
}

// eval returns the value of a script.
func eval[T any](t *testing.T, b *browser, script string) T {
	t.Helper()
	var v T
	b.do(t, chromedp.Evaluate(script, &v))
	return v
}

// until waits for a condition in the page.
func (b *browser) until(t *testing.T, script string) {
	t.Helper()
	if err := chromedp.Run(b, chromedp.Poll(script, nil, chromedp.WithPollingTimeout(patience))); err != nil {
		t.Fatalf("waiting for %s: %v; shown %q, filter %q", script, err, eval[string](t, b, `document.getElementById('shown').textContent`), eval[string](t, b, `document.getElementById('filter').value`))
	}
}

// shot keeps a picture where MERIDIAN_SCREENSHOTS names a folder.
func (b *browser) shot(t *testing.T, name string) {
	dir := os.Getenv("MERIDIAN_SCREENSHOTS")
	if dir == "" {
		return
	}
	var png []byte
	b.do(t, chromedp.FullScreenshot(&png, 100))
	if err := os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644); err != nil {
		t.Fatal(err)
	}
}

func (b *browser) noComplaints(t *testing.T) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, c := range b.complaints {
		t.Errorf("the page complains: %s", c)
	}
}

// watchShifts counts what moves without anybody's doing.
const watchShifts = `window.shift = 0; new PerformanceObserver(l => { for (const e of l.getEntries()) if (!e.hadRecentInput) window.shift += e.value; }).observe({type: 'layout-shift', buffered: true});`

func TestThePageShowsTenThousandRequests(t *testing.T) {
	s, b := newSite(t, keptRows), newBrowser(t)
	b.do(t, chromedp.EmulateViewport(1440, 1000), chromedp.Navigate(s.URL))
	b.do(t, chromedp.Evaluate(watchShifts, nil))
	b.until(t, `document.getElementById('shown').textContent === '10000'`)
	b.until(t, `document.querySelectorAll('#waterfall .span').length > 5`)
	if n := eval[int](t, b, `document.querySelectorAll('#list .row').length`); n == 0 || n > 80 {
		t.Errorf("%d rows are drawn, want only those in sight", n)
	}
	if got := eval[string](t, b, `document.querySelector('#nodes').innerText`); !strings.Contains(got, "ctx0") || !strings.Contains(got, "−") && !strings.Contains(got, "-2.35 ms ± 1.23 µs") {
		t.Errorf("nodes: %q", got)
	}
	b.until(t, `document.querySelectorAll('#nodes svg path').length > 0`) // the history of a clock
	// The list is walked through to its end while requests come in.
	frames := `new Promise(done => { const list = document.getElementById('list'), at = []; let n = 0;
		const step = now => { at.push(now); list.scrollTop += 2600; if (++n < 100) requestAnimationFrame(step); else done(Math.max(...at.slice(1).map((v, i) => v - at[i]))); };
		requestAnimationFrame(step); })`
	for i := range 200 {
		s.request(keptRows + i)
	}
	var longest float64
	b.do(t, chromedp.Evaluate(frames, &longest, func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }))
	b.until(t, `document.getElementById('list').scrollTop > 250000`)
	b.until(t, `document.querySelectorAll('#list .row').length > 10`)
	paint := eval[float64](t, b, `performance.getEntriesByName('first-paint')[0]?.startTime ?? 0`)
	t.Logf("first paint %.0f ms, longest of 100 frames while scrolling %.0f ms", paint, longest)
	if shift := eval[float64](t, b, `window.shift`); shift > 0.01 {
		t.Errorf("layout shift %v", shift)
	}
	if title := eval[string](t, b, `document.title`); title != "Meridian" {
		t.Errorf("a client's text ran: title %q", title)
	}
	b.do(t, chromedp.Evaluate(`document.getElementById('list').scrollTop = 0`, nil))
	b.shot(t, "wide-light")
	b.noComplaints(t)
}

func TestThePageShowsRanksAndStages(t *testing.T) {
	s, b := newSite(t, 30), newBrowser(t)
	rank := 1
	s.line.Phases[2].DPRank = &rank
	b.do(t, chromedp.EmulateViewport(1440, 1000), chromedp.Navigate(s.URL))
	b.until(t, `document.querySelectorAll('#nodes .rank').length === 2`)
	got := eval[[]string](t, b, `[...document.querySelectorAll('#nodes tbody:last-of-type tr')].map(r => [...r.cells].slice(0, 6).map(c => c.textContent).join('|'))`)
	want := []string{"gen1 2 ranks × 4 stages|gen|ready|9|2| 70 / 200", "rank 0|||7|2| 60 / 100", "rank 1|||2|0| 10 / 100"}
	if !slices.Equal(got, want) {
		t.Errorf("rows %q, want %q", got, want)
	}
	if got := eval[float64](t, b, `document.querySelectorAll('#nodes .rank meter')[0].value`); got != 60 {
		t.Errorf("the meter of rank 0 shows %v blocks", got)
	}
	b.until(t, `document.getElementById('more').textContent.includes('rank on gen01')`)
	b.shot(t, "ranks-light")
	b.do(t, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}), chromedp.EmulateViewport(390, 844, chromedp.EmulateMobile))
	if got := eval[int](t, b, `document.documentElement.scrollWidth - innerWidth`); got > 0 {
		t.Errorf("the page is %d px wider than the phone", got)
	}
	b.shot(t, "ranks-phone-dark")
	b.noComplaints(t)
}

// kvAnswer is that of a node after so many prompts of 1,000 tokens: a pool that sees everything, with host memory, and one of a
// window; a disk.
func kvAnswer(prompts int) json.RawMessage {
	return fmt.Appendf(nil, `{"enabled":true,"tokens_per_block":32,"ranks":[{"groups":[
		{"window_tokens":null,"block_bytes":65536,"max_blocks":1000,"used_blocks":750,"evictable_blocks":500,"host":{"max_blocks":4000,"used_blocks":2900,"evictable_blocks":2890}},
		{"window_tokens":512,"block_bytes":131072,"max_blocks":200,"used_blocks":80,"evictable_blocks":20,"host":null}],
		"disk":{"max_blocks":9000,"used_blocks":1234,"evictable_blocks":null},"prompt_tokens":%d,"hit_tokens":{"device":%d,"host":%d,"disk":%d},
		"full_blocks":%d,"partial_blocks":%d,"missed_blocks":%d,"moved":{"copied_bytes":0,"onboard_bytes":%d,"offload_bytes":4096,"host_dropped_blocks":%d,"disk_loaded_blocks":0,"disk_stored_blocks":0,"disk_dropped_blocks":0,"disk_broken_blocks":0}}]}`,
		1000*prompts, 500*prompts, 200*prompts, 100*prompts, 25*prompts, prompts, 5*prompts, 1<<20*prompts, 3*prompts)
}

func TestThePageShowsTheKVMemory(t *testing.T) {
	s, b := newSite(t, 300), newBrowser(t)
	s.line.Phases[1].Fetched, s.line.Tokens.Cached = 128, 400
	s.kv.put(map[string]json.RawMessage{"ctx0": kvAnswer(7), "gen0": json.RawMessage(`{"enabled":false,"tokens_per_block":0,"ranks":[]}`)})
	b.do(t, chromedp.EmulateViewport(1440, 1000), chromedp.Navigate(s.URL))
	b.until(t, `document.querySelectorAll('#kv tbody tr').length === 2`)
	b.until(t, `document.querySelector('#kv').innerText.includes('80 % of 7000 175 / 7 / 35, since its start')`)
	s.kv.put(map[string]json.RawMessage{"ctx0": kvAnswer(10)})
	b.until(t, `document.querySelector('#kv').innerText.includes('80 % of 3000')`)
	cells := eval[[][]string](t, b, `[...document.querySelectorAll('#kv tbody tr')].map(r => [...r.cells].map(c => c.textContent))`)
	want := [][]string{
		{"ctx0", "all tokens", " 750 / 1000", " 2900 / 4000", " 1234 / 9000", " 80 % of 3000 75 / 3 / 15", "3.0 MiB from host, 9 dropped by host"},
		{"", "last 512", " 80 / 200", "–", "", "", ""},
	}
	if !reflect.DeepEqual(cells, want) {
		t.Errorf("cells %q, want %q", cells, want)
	}
	labels := eval[[]string](t, b, `[...document.querySelectorAll('#kv .parts')].map(p => p.getAttribute('aria-label'))`)
	if labels[0] != "250 needed, 500 evictable, 250 free blocks" || labels[3] != "1500 device, 600 host, 300 disk, 600 computed prompt tokens" {
		t.Errorf("bars %q", labels)
	}
	b.until(t, `document.querySelectorAll('#waterfall .span').length > 5`)
	prompt, computed := s.line.Tokens.Prompt, 0
	for i := range s.line.Phases {
		for _, n := range s.line.Phases[i].Chunks.Column("tokens") {
			computed += int(n)
		}
	}
	text := fmt.Sprintf("272 reused · 128 moved from a peer · %d computed", prompt-400)
	if again := computed - (prompt - 400); again > 0 {
		text += fmt.Sprintf(" · %d recomputed", again)
	}
	text += fmt.Sprintf(" · %d moved to the generation node", s.line.Handover.Tokens)
	if got := eval[string](t, b, `document.getElementById('reuse').textContent`); !strings.HasPrefix(got, text) {
		t.Errorf("the request's KV: %q, want %q", got, text)
	}
	b.shot(t, "kv-light")
	b.do(t, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}))
	b.shot(t, "kv-dark")
	b.do(t, chromedp.EmulateViewport(390, 844, chromedp.EmulateMobile))
	if got := eval[int](t, b, `document.documentElement.scrollWidth - innerWidth`); got > 0 {
		t.Errorf("the page is %d px wider than the phone", got)
	}
	b.shot(t, "kv-phone")
	b.noComplaints(t)
}

func TestThePageByKeyboard(t *testing.T) {
	s, b := newSite(t, 300), newBrowser(t)
	b.do(t, chromedp.EmulateViewport(1440, 1000), chromedp.Navigate(s.URL))
	b.until(t, `document.querySelectorAll('#waterfall .span').length > 5`)
	b.do(t, chromedp.Focus("#list"), chromedp.KeyEvent(kb.Home), chromedp.KeyEvent(kb.ArrowDown), chromedp.KeyEvent(kb.ArrowDown))
	b.until(t, `document.getElementById('title').textContent.includes('req-00297')`)
	if got := eval[string](t, b, `location.hash`); got != "#req-00297" {
		t.Errorf("address %q, want the chosen request", got)
	}
	if got := eval[string](t, b, `document.getElementById('list').getAttribute('aria-activedescendant')`); got != "r-req-00297" {
		t.Errorf("the list's active row is %q", got)
	}
	b.do(t, chromedp.KeyEvent("/"))
	b.until(t, `document.activeElement.id === 'filter'`)
	b.do(t, chromedp.Evaluate(`filter.value = ''`, nil), chromedp.KeyEvent("outcome:failed ttft<20ms")) // an emulated key types even what the page keeps
	want := 0
	for i := range 300 {
		if i%7 == 0 && 1+i%90 < 20 {
			want++
		}
	}
	b.until(t, fmt.Sprintf(`document.getElementById('shown').textContent === '%d of 300'`, want))
	b.do(t, chromedp.Evaluate(`filter.value = ''; filter.dispatchEvent(new Event('input'))`, nil))
	b.do(t, chromedp.Evaluate(`[...document.querySelectorAll('#histogram button')].find(b => !b.disabled).click()`, nil))
	b.until(t, `document.getElementById('shown').textContent.includes(' of ')`)
	b.do(t, chromedp.Evaluate(`document.getElementById('clear').click()`, nil))
	b.until(t, `document.getElementById('shown').textContent === '300'`)
	b.do(t, chromedp.Focus("#spans tbody tr:nth-child(2)"), chromedp.KeyEvent(kb.Enter))
	b.until(t, `document.querySelector('#spans tbody tr:nth-child(2)').getAttribute('aria-selected') === 'true'`)
	b.do(t, chromedp.Evaluate(`location.hash = '#unknown'`, nil))
	b.until(t, `document.getElementById('title').textContent === 'No request unknown is known'`)
	b.noComplaints(t)
}

func TestThePageOnAPhoneInTheDark(t *testing.T) {
	s, b := newSite(t, 300), newBrowser(t)
	b.do(t, emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: "dark"}}),
		chromedp.EmulateViewport(390, 844, chromedp.EmulateMobile, chromedp.EmulateTouch), chromedp.Navigate(s.URL))
	b.until(t, `document.querySelectorAll('#waterfall .span').length > 5`)
	if got := eval[int](t, b, `document.documentElement.scrollWidth - innerWidth`); got > 0 {
		t.Errorf("the page is %d px wider than the phone", got)
	}
	if got := eval[string](t, b, `getComputedStyle(document.body).backgroundColor`); got == "rgb(255, 255, 255)" {
		t.Error("the page is white in the dark")
	}
	b.shot(t, "phone-dark")
	b.noComplaints(t)
	if b.bytes > 150<<10+300*1024 { // the files, and the rows of 300 requests
		t.Errorf("%.0f bytes were loaded", b.bytes)
	}
}

func TestThePageKeepsItsRequestsWhenItsRouterIsStartedAnew(t *testing.T) {
	s, b := newSite(t, 30), newBrowser(t)
	b.do(t, chromedp.EmulateViewport(1440, 1000), chromedp.Navigate(s.URL))
	b.until(t, `document.getElementById('shown').textContent === '30'`)
	s.again(t)
	s.request(30)
	b.until(t, `document.getElementById('live').textContent === 'live' && document.querySelector('#list .row[aria-posinset="1"]')?.id === 'r-req-00030'`)
	b.until(t, `document.getElementById('shown').textContent === '31'`)
}

func TestThePageForgetsTheRequestsThatItsRouterForgot(t *testing.T) {
	s, b := newSite(t, 30), newBrowser(t)
	b.do(t, chromedp.EmulateViewport(1440, 1000), chromedp.Navigate(s.URL))
	b.until(t, `document.getElementById('shown').textContent === '30'`)
	s.feed = NewFeed(time.Now, s.feed.clocks)
	s.again(t)
	b.until(t, `document.querySelectorAll('#list .row').length === 0 && !document.getElementById('none').hidden`)
}

func TestThePageShowsTheTimeThatItWasPaused(t *testing.T) {
	s, b := newSite(t, 1), newBrowser(t)
	b.do(t, chromedp.EmulateViewport(1440, 1000), chromedp.Navigate(s.URL))
	columns := `new Set([...document.querySelectorAll('#stack rect')].map(r => r.getAttribute('x'))).size`
	b.until(t, columns+` === 1`)
	b.do(t, chromedp.Click("#pause"))
	for i := range 3 {
		s.later.Add(int64(windowLength))
		s.request(1 + i)
		for before := s.told.Load(); s.told.Load() < before+2; { // the first of them with its windows
			b.do(t, chromedp.Sleep(50*time.Millisecond))
		}
	}
	if got := eval[int](t, b, columns); got != 1 {
		t.Errorf("the paused page shows %d columns", got)
	}
	b.do(t, chromedp.Click("#pause"))
	b.until(t, columns+` === 4`)
	b.until(t, `document.getElementById('shown').textContent === '4'`)
}

func TestThePageGoesOnBesideANodeThatItDoesNotUnderstand(t *testing.T) {
	s, b := newSite(t, 30), newBrowser(t)
	s.kv.put(map[string]json.RawMessage{"ctx0": kvAnswer(7), "gen0": json.RawMessage(`null`), "gen1": json.RawMessage(`{"ranks":[{"prompt_tokens":1}]}`)})
	b.do(t, chromedp.EmulateViewport(1440, 1000), chromedp.Navigate(s.URL))
	b.until(t, `document.getElementById('shown').textContent === '30'`)
	b.until(t, `document.querySelectorAll('#kv tbody tr').length === 2`)
	if got := eval[string](t, b, `document.getElementById('live').textContent`); got != "live" {
		t.Errorf("the stream is %q", got)
	}
	b.noComplaints(t)
}

func TestTheHistogramNamesNoLimitThatItsEndsDoNotKeep(t *testing.T) {
	s, b := newSite(t, 0), newBrowser(t)
	for i, ttft := range []int64{20_000, 60_000_000_000} {
		l := s.line
		l.RequestID, l.TTFTNS = fmt.Sprintf("req-%d", i), &ttft
		s.feed.Add(&l)
	}
	b.do(t, chromedp.EmulateViewport(1440, 1000), chromedp.Navigate(s.URL))
	b.until(t, `document.getElementById('shown').textContent === '2'`)
	got := eval[[]string](t, b, `[...document.querySelectorAll('#histogram button:enabled')].map(b => b.title)`)
	want := []string{"1 with a first token within 127 µs", "1 with a first token after 7.87 s"}
	if !slices.Equal(got, want) {
		t.Errorf("columns %q, want %q", got, want)
	}
}
