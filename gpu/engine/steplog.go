package engine

import (
	"meridian.internal/gpu/backend"
	"meridian.internal/shared/infer"
)

// pageRows is how many steps share a page. A request carries the rows of its first and last page that are not its own too:
// more of them make long requests cheaper and short ones larger.
const pageRows = 64

// columnBytes is what a column of a page takes, mostly.
const columnBytes = 4*pageRows + 16

// batchLog is the engine's log of steps, for the requests that keep theirs. A page is freed when the last request that
// was in one of its steps has ended.
type batchLog struct {
	page *infer.StepPage
	cuts []int64 // room for those of a step
}

// add logs a step.
func (l *batchLog) add(r infer.StepRow) {
	if l.page == nil || l.page.Rows == pageRows {
		l.page = new(infer.StepPage)
		room := make([]byte, infer.StepColumns*columnBytes)
		for i := range l.page.Columns {
			l.page.Columns[i] = room[i*columnBytes : i*columnBytes : (i+1)*columnBytes]
		}
		if n := len(r.StageNS); n > 0 {
			l.page.Stages = make([]byte, 0, n*columnBytes)
		}
	}
	l.page.Append(r)
}

// appendCuts appends when a step went from one stage to the next, in the order of infer.StepRow.
func appendCuts(dst []int64, stages []backend.Stamps) []int64 {
	for i := 1; i < len(stages); i++ {
		dst = append(dst, stages[i-1].ForwardEndNS, stages[i].ForwardStartNS)
	}
	return dst
}

// stepLog is the decode steps of one request: 20 bytes for each run of steps of which each took the token after the one
// before it, and 16 a page.
type stepLog struct {
	on   bool
	page *infer.StepPage // of the newest step
	run  infer.StepRun   // the newest, of that page; not yet in runs
	n    int
	max  int

	pages     []pageRuns
	runs      []infer.StepRun
	truncated int64
	tail      infer.StepPage // the last page as it was when the request ended: it may grow on
}

// pageRuns is a page and its first run.
type pageRuns struct {
	page  *infer.StepPage
	first int
}

// add takes in the newest step of the log.
func (l *stepLog) add(b *batchLog, step, kv, tokens int) {
	if l.n >= l.max {
		l.truncated++
		return
	}
	l.n++
	at := int32(b.page.Rows - 1)
	if r := &l.run; l.page == b.page && r.From+r.N == at && tokens == 1 && r.Tokens == 1 && int(r.KVTokens+r.N) == kv && int(r.Step+r.N) == step {
		r.N++
		return
	}
	l.begin(b.page, infer.StepRun{From: at, N: 1, Step: int32(step), KVTokens: int32(kv), Tokens: int32(tokens)})
}

// begin starts another run.
func (l *stepLog) begin(page *infer.StepPage, r infer.StepRun) {
	if l.run.N > 0 {
		l.runs = append(l.runs, l.run)
	}
	if l.page != page {
		l.page = page
		l.pages = append(l.pages, pageRuns{page, len(l.runs)})
	}
	l.run = r
}

// close takes note, on the engine's goroutine, of how far the last page has come.
func (l *stepLog) close() {
	if l.n > 0 {
		l.tail = *l.page
	}
}

// records gives the steps of a closed log.
func (l *stepLog) records() *infer.StepRecords {
	r := &infer.StepRecords{N: l.n, Truncated: l.truncated, Pages: make([]infer.StepPage, len(l.pages))}
	if l.n == 0 {
		return r
	}
	runs := append(l.runs, l.run)
	end := len(runs)
	for i := len(l.pages) - 1; i >= 0; i-- {
		p := &r.Pages[i]
		if i == len(l.pages)-1 {
			*p = l.tail
		} else {
			*p = *l.pages[i].page
		}
		p.Runs = runs[l.pages[i].first:end]
		end = l.pages[i].first
	}
	return r
}
