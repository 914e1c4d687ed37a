package timeline

import (
	"slices"
	"strconv"
)

// Columns are lists of equal length under their names; times are converted where the phase is aligned, else raw.
type Columns struct {
	Names  []string
	Values [][]int64
}

// Column returns the values under name, nil if there are none.
func (c *Columns) Column(name string) []int64 {
	if c == nil {
		return nil
	}
	for i, n := range c.Names {
		if n == name {
			return c.Values[i]
		}
	}
	return nil
}

// Stage is when a stage of a pipeline ran each step.
type Stage struct{ StartNS, EndNS []int64 }

// Stages are those of the pipeline that ran the steps, one where the device is none; nil without steps. The first starts
// with the forward and the last ends with it; the cuts between them have columns of their own.
func (c *Columns) Stages() []Stage {
	start, end := c.Column("forward_start_ns"), c.Column("forward_end_ns")
	if start == nil {
		return nil
	}
	list := []Stage{{StartNS: start}}
	for cut := 0; ; cut += 2 {
		left, entered := c.Column(cutName(cut)), c.Column(cutName(cut+1))
		if left == nil || entered == nil {
			break
		}
		list[len(list)-1].EndNS = left
		list = append(list, Stage{StartNS: entered})
	}
	list[len(list)-1].EndNS = end
	return list
}

// cutName is the column of a cut, in the order of infer.StepRow.
func cutName(cut int) string {
	if cut%2 == 0 {
		return "stage" + strconv.Itoa(cut/2) + "_end_ns"
	}
	return "stage" + strconv.Itoa(cut/2+1) + "_start_ns"
}

func (c *Columns) addCut(cut int, at []int64) {
	c.Names, c.Values = append(slices.Clip(c.Names), cutName(cut)), append(c.Values, at)
}

// reached is how many of n rows, of which last gives the latest stamp, the estimate places: a column must not hold converted and raw
// stamps. Without alignment all stay raw.
func (s *source) reached(n int, last func(int) int64) int {
	if !s.ok {
		return n
	}
	for i := range n {
		if !s.place(last(i)).ok {
			return i
		}
	}
	return n
}

// column converts a list of stamps; without alignment it stays raw.
func (s *source) column(n int, at func(int) int64) []int64 {
	out := make([]int64, n)
	for i := range out {
		out[i] = at(i)
		if p := s.place(out[i]); p.ok {
			out[i] = p.at
		}
	}
	return out
}

func plain(n int, at func(int) int64) []int64 {
	out := make([]int64, n)
	for i := range out {
		out[i] = at(i)
	}
	return out
}

func (s *source) chunkColumns() *Columns {
	ch := s.Record.Chunks
	n := s.reached(len(ch), func(i int) int64 { return ch[i].SampleEndNS })
	if n == 0 {
		return nil
	}
	c := &Columns{
		Names: chunkNames,
		Values: [][]int64{
			plain(n, func(i int) int64 { return ch[i].Iter }), plain(n, func(i int) int64 { return int64(ch[i].Tokens) }),
			plain(n, func(i int) int64 { return int64(ch[i].KVTokens) }), plain(n, func(i int) int64 { return int64(ch[i].BatchSize) }),
			s.column(n, func(i int) int64 { return ch[i].ForwardStartNS }), s.column(n, func(i int) int64 { return ch[i].ForwardEndNS }),
			s.column(n, func(i int) int64 { return ch[i].SampleEndNS }),
		},
	}
	cuts := len(ch[0].StageNS)
	for i := range n {
		cuts = min(cuts, len(ch[i].StageNS))
	}
	for cut := range cuts {
		c.addCut(cut, s.column(n, func(i int) int64 { return ch[i].StageNS[cut] }))
	}
	return c
}

func (s *source) stepColumns() *Columns {
	st := s.Steps
	if st == nil {
		return nil
	}
	all := len(st.Iter)
	n := s.reached(all, func(i int) int64 { return st.TokenNS[i] })
	c := &Columns{
		Names: stepNames,
		Values: [][]int64{
			plain(n, func(i int) int64 { return int64(st.Step[i]) }), plain(n, func(i int) int64 { return st.Iter[i] }),
			plain(n, func(i int) int64 { return int64(st.KVTokens[i]) }), plain(n, func(i int) int64 { return int64(st.BatchSize[i]) }),
			s.column(n, func(i int) int64 { return st.ForwardStartNS[i] }), s.column(n, func(i int) int64 { return st.ForwardEndNS[i] }),
			s.column(n, func(i int) int64 { return st.SampleEndNS[i] }), s.column(n, func(i int) int64 { return st.TokenNS[i] }),
		},
	}
	if len(st.Tokens) == all && n > 0 {
		c.Names, c.Values = append(slices.Clip(c.Names), "tokens"), append(c.Values, plain(n, func(i int) int64 { return int64(st.Tokens[i]) }))
	}
	for cut, at := range st.StageNS {
		if len(at) == all {
			c.addCut(cut, s.column(n, func(i int) int64 { return at[i] }))
		}
	}
	return c
}
