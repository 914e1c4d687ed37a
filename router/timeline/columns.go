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
