package infer

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// ErrBadStepPage is returned when a page of steps does not hold what it says.
var ErrBadStepPage = errors.New("infer: bad page of steps")

// Steps are the decode steps of a request as columns of equal length. Step i is the request's own step number
// Step[i]; Iter[i] is the engine's iteration that ran it.
type Steps struct {
	Step           []int32
	Iter           []int64
	ForwardStartNS []int64
	ForwardEndNS   []int64
	SampleEndNS    []int64
	TokenNS        []int64 // one per batch: when the host had the tokens
	KVTokens       []int32
	BatchSize      []int32
	Tokens         []int32 // query tokens. More than one where a preempted request is recomputed
	// StageNS are the cuts between the stages of a pipeline, a column for each: see StepRow. nil: the device is no pipeline.
	StageNS   [][]int64
	Truncated int64 // steps beyond the cap, not kept
}

// StepRecords are the decode steps of a request as its engine keeps them. What a batch has in common is encoded once, for
// all its requests; a request adds only which rows are its own. Another request costs a copy of bytes, not of numbers.
type StepRecords struct {
	Pages     []StepPage
	N         int   // steps
	Truncated int64 // steps beyond the cap, not kept
}

// StepRow is what all requests of a batch have in common.
type StepRow struct {
	Iter                                               int64
	ForwardStartNS, ForwardEndNS, SampleEndNS, TokenNS int64
	BatchSize                                          int64
	// StageNS says when a step went from one stage of a pipeline to the next: the end of the first, the start of the second, its
	// end, … up to the start of the last. The first starts at ForwardStartNS, the last ends at ForwardEndNS. nil: there are none.
	StageNS []int64
}

// The most that a node can have: data-parallel ranks, and pipeline stages of each.
const (
	MaxRanks  = 64
	MaxStages = 256
)

// StepColumns is the number of columns of a page, but for that of the stages.
const StepColumns = 6

func (r *StepRow) values() [StepColumns]int64 {
	return [...]int64{r.Iter, r.ForwardStartNS, r.ForwardEndNS, r.SampleEndNS, r.TokenNS, r.BatchSize}
}

// StepRun is rows [From, From+N) of a page that held the request. Step and KVTokens are those of the first of them, and rise by
// one with each; Tokens are the query tokens of each.
type StepRun struct{ From, N, Step, KVTokens, Tokens int32 }

// StepPage is a stretch of batches as columns, in the order of StepRow: zigzag varints, each the difference from the row
// before, the first from 0. Bytes that were appended do not change: a copy of a page stays valid while the page grows.
type StepPage struct {
	Rows    int
	Columns [StepColumns][]byte
	Cuts    int       // values of StageNS of each row
	Stages  []byte    // of each row its cuts, each the difference from the one before, the first from the start of the forward
	Runs    []StepRun // rising, apart from each other

	last [StepColumns]int64
}

// Append adds a row, with as many cuts as those before.
func (p *StepPage) Append(r StepRow) {
	for i, v := range r.values() {
		p.Columns[i], p.last[i] = appendZigzag(p.Columns[i], v-p.last[i]), v
	}
	last := r.ForwardStartNS
	for _, v := range r.StageNS {
		p.Stages, last = appendZigzag(p.Stages, v-last), v
	}
	p.Cuts = len(r.StageNS)
	p.Rows++
}

func appendZigzag(b []byte, d int64) []byte {
	u := uint64(d)<<1 ^ uint64(d>>63)
	for u >= 0x80 {
		b = append(b, byte(u)|0x80)
		u >>= 7
	}
	return append(b, byte(u))
}

// AppendPage decodes the rows that the page's runs name. Its error is ErrBadStepPage; the steps then are as before.
func (s *Steps) AppendPage(p *StepPage) error {
	var rows [StepColumns][]int64
	for i, c := range p.Columns {
		var err error
		if rows[i], err = parseColumn(c, p.Rows); err != nil {
			return err
		}
	}
	cuts, err := p.parseStages(rows[1])
	switch {
	case err != nil:
		return err
	case len(s.Step) > 0 && len(s.StageNS) != p.Cuts:
		return fmt.Errorf("%w: it has %d cuts between stages, the one before %d", ErrBadStepPage, p.Cuts, len(s.StageNS))
	}
	end := int32(0)
	for _, r := range p.Runs {
		if r.N < 1 || r.From < end || int(r.From) > p.Rows || int(r.N) > p.Rows-int(r.From) {
			return fmt.Errorf("%w: a run of %d rows from %d, after %d, of %d", ErrBadStepPage, r.N, r.From, end, p.Rows)
		}
		end = r.From + r.N
	}
	if s.StageNS == nil && p.Cuts > 0 {
		s.StageNS = make([][]int64, p.Cuts)
	}
	for _, r := range p.Runs {
		for k := range r.N {
			at := r.From + k
			s.Step, s.KVTokens, s.Tokens = append(s.Step, r.Step+k), append(s.KVTokens, r.KVTokens+k), append(s.Tokens, r.Tokens)
			s.BatchSize = append(s.BatchSize, int32(rows[5][at]))
		}
		from, to := r.From, r.From+r.N
		s.Iter = append(s.Iter, rows[0][from:to]...)
		s.ForwardStartNS = append(s.ForwardStartNS, rows[1][from:to]...)
		s.ForwardEndNS = append(s.ForwardEndNS, rows[2][from:to]...)
		s.SampleEndNS = append(s.SampleEndNS, rows[3][from:to]...)
		s.TokenNS = append(s.TokenNS, rows[4][from:to]...)
		for i := range s.StageNS {
			s.StageNS[i] = append(s.StageNS[i], cuts[i][from:to]...)
		}
	}
	return nil
}

// Join appends the steps that follow; both are of one request.
func (s *Steps) Join(more *Steps) {
	s.Step = append(s.Step, more.Step...)
	s.Iter = append(s.Iter, more.Iter...)
	s.ForwardStartNS = append(s.ForwardStartNS, more.ForwardStartNS...)
	s.ForwardEndNS = append(s.ForwardEndNS, more.ForwardEndNS...)
	s.SampleEndNS = append(s.SampleEndNS, more.SampleEndNS...)
	s.TokenNS = append(s.TokenNS, more.TokenNS...)
	s.KVTokens = append(s.KVTokens, more.KVTokens...)
	s.BatchSize = append(s.BatchSize, more.BatchSize...)
	s.Tokens = append(s.Tokens, more.Tokens...)
	s.Truncated = more.Truncated
	if s.StageNS == nil && len(more.StageNS) > 0 {
		s.StageNS = make([][]int64, len(more.StageNS))
	}
	for i := range min(len(s.StageNS), len(more.StageNS)) {
		s.StageNS[i] = append(s.StageNS[i], more.StageNS[i]...)
	}
}

// parseStages gives the cuts of the rows, a column for each.
func (p *StepPage) parseStages(starts []int64) ([][]int64, error) {
	if p.Cuts < 0 || p.Cuts > 2*(MaxStages-1) || p.Rows*p.Cuts > len(p.Stages) { // as above: no allocation by a claim
		return nil, fmt.Errorf("%w: stages have %d bytes for %d cuts of %d rows", ErrBadStepPage, len(p.Stages), p.Cuts, p.Rows)
	}
	out := make([][]int64, p.Cuts)
	for i := range out {
		out[i] = make([]int64, p.Rows)
	}
	b := p.Stages
	for row := range p.Rows {
		last := starts[row]
		for i := range out {
			d, n := binary.Varint(b)
			if n <= 0 {
				return nil, fmt.Errorf("%w: the stages end at row %d of %d", ErrBadStepPage, row, p.Rows)
			}
			last += d
			out[i][row] = last
			b = b[n:]
		}
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("%w: there are stages of more than %d rows", ErrBadStepPage, p.Rows)
	}
	return out, nil
}

// Decode gives the steps as columns.
func (r *StepRecords) Decode() (*Steps, error) {
	s := &Steps{Truncated: r.Truncated}
	for i := range r.Pages {
		if err := s.AppendPage(&r.Pages[i]); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func parseColumn(b []byte, rows int) ([]int64, error) {
	if rows < 0 || rows > len(b) { // each value takes a byte at least: no allocation by a claim
		return nil, fmt.Errorf("%w: a column has %d bytes for %d rows", ErrBadStepPage, len(b), rows)
	}
	out := make([]int64, rows)
	last := int64(0)
	for i := range out {
		d, n := binary.Varint(b)
		if n <= 0 {
			return nil, fmt.Errorf("%w: a column ends at row %d of %d", ErrBadStepPage, i, rows)
		}
		last += d
		out[i] = last
		b = b[n:]
	}
	if len(b) > 0 {
		return nil, fmt.Errorf("%w: a column has more than %d rows", ErrBadStepPage, rows)
	}
	return out, nil
}
