package main

// The weights of a decode step are read once, in panels of six rows. Left to itself the processor notices only within a
// row that memory is read in order, so each panel of short rows would begin with misses.
const (
	// panelAhead is the largest panel in bytes that is prefetched as a whole, during the panel before it.
	panelAhead = 16 << 10
	// bytesAhead is how far ahead in its own row a longer one is prefetched; a panel ahead would leave the first-level
	// cache before it is used. Measured: 1,024 is better than 4,096 and 12,288.
	bytesAhead = 1 << 10
)

func (t tile) prefetches() bool { return t.nr == 6 }

// prefetchSetup points R13 and R14 at what rows 0 and 3 will need.
func (t tile) prefetchSetup(a *asm) {
	a.op("LEAQ (R10)(R10*2), R14")
	a.op("LEAQ (R14)(R14*1), R13")
	a.op("MOVQ $%d, BX", bytesAhead)
	a.op("CMPQ R13, $%d", panelAhead)
	a.op("CMOVQGT BX, R13")
	a.op("ADDQ DI, R13")
	a.op("ADDQ R13, R14")
}

func (t tile) prefetch(a *asm) {
	for j := range t.nr {
		base, i := "R13", j
		if j >= 3 {
			base, i = "R14", j-3
		}
		a.op("PREFETCHT0 %s", address(base, "R10", "", i, 0))
	}
	a.op("ADDQ $%d, R13", 16*t.elementSize())
	a.op("ADDQ $%d, R14", 16*t.elementSize())
}
