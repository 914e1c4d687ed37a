package rows

// Counter makes a counter that only rises out of snapshots of a total. A total that falls (its owner began anew) is the
// base of what comes; nothing is subtracted.
type Counter struct {
	Total int64 // the sum of all rises
	last  int64
	fell  bool
}

// Observe takes the next snapshot; warn is true the first time that one falls.
func (c *Counter) Observe(v int64) (warn bool) {
	if v < c.last {
		warn = !c.fell
		c.fell = true
	} else {
		c.Total += v - c.last
	}
	c.last = v
	return warn
}
