package main

// reduceSix adds the lanes of mr x 6 outputs of AVX-512 together, in the tree of reduceEach, with a third of its
// instructions: each step adds the halves of two registers and keeps both results in one. What reduceEach needs matters:
// with a head size of 64 it would take longer than the products.
func (t tile) reduceSix(a *asm) {
	switch t.mr {
	case 4:
		t.reduceFourRows(a)
	case 2:
		t.reduceTwoRows(a)
	default:
		t.reduceOneRow(a)
	}
}

// halve leaves in x the sums of the halves of x and y. Registers 24 and 25 are free in all tiles.
//
//	8: 16 lanes of x | of y                  -> 8 lanes of x | 8 of y
//	4: 8 lanes of two outputs in x | in y    -> 4 lanes each of the four
//	2: 4 lanes of four outputs in x and in y -> in each quarter 2 of x, 2 of y, interleaved: x0 y0 x1 y1
//	1: such quarters of x and y              -> in each quarter the sums x0 y0 from x and from y
func halve(a *asm, lanes, x, y int) {
	lo, hi := "", ""
	switch lanes {
	case 8:
		lo, hi = "VSHUFF64X2 $0x44,", "VSHUFF64X2 $0xee,"
	case 4:
		lo, hi = "VSHUFF64X2 $0x88,", "VSHUFF64X2 $0xdd,"
	case 2:
		lo, hi = "VUNPCKLPS", "VUNPCKHPS"
	default:
		lo, hi = "VUNPCKLPD", "VUNPCKHPD"
	}
	a.op("%s Z%d, Z%d, Z24", lo, y, x)
	a.op("%s Z%d, Z%d, Z25", hi, y, x)
	a.op("VADDPS Z25, Z24, Z%d", x)
}

// halveOwn is the last step for one register alone: quarters x0 y0 x1 y1 become x y x y.
func halveOwn(a *asm, x int) {
	a.op("VPERMILPS $0x4e, Z%d, Z24", x)
	a.op("VADDPS Z24, Z%[1]d, Z%[1]d", x)
}

// gather brings four outputs into the quarters of the first one's register, 4 lanes each.
func gather(a *asm, o [4]int) {
	halve(a, 8, o[0], o[1])
	halve(a, 8, o[2], o[3])
	halve(a, 4, o[0], o[2])
}

// reduceFourRows keeps a row in each quarter.
func (t tile) reduceFourRows(a *asm) {
	at := func(i, j int) int { return t.sum(i, j, 0) }
	for j := range 6 {
		gather(a, [4]int{at(0, j), at(1, j), at(2, j), at(3, j)})
	}
	for j := 0; j < 6; j += 2 {
		halve(a, 2, at(0, j), at(0, j+1))
	}
	halve(a, 1, at(0, 0), at(0, 2))
	halveOwn(a, at(0, 4))
	for i := range 4 {
		a.op("VEXTRACTF32X4 $%d, Z%d, (DX)", i, at(0, 0))
		a.op("VEXTRACTF32X4 $%d, Z%d, X24", i, at(0, 4))
		a.op("VMOVSD X24, 16(DX)")
		if i < 3 {
			a.op("ADDQ R12, DX")
		}
	}
}

// reduceTwoRows keeps columns 0 to 2 of the two rows in the lower quarters, columns 3 to 5 in the upper ones.
func (t tile) reduceTwoRows(a *asm) {
	at := func(i, j int) int { return t.sum(i, j, 0) }
	for j := range 3 {
		gather(a, [4]int{at(0, j), at(1, j), at(0, j+3), at(1, j+3)})
	}
	halve(a, 2, at(0, 0), at(0, 1))
	halve(a, 2, at(0, 2), at(0, 2))
	halve(a, 1, at(0, 0), at(0, 2))
	for i := range 2 {
		a.op("VEXTRACTF32X4 $%d, Z%d, (DX)", i, at(0, 0)) // its fourth element is overwritten
		a.op("VEXTRACTF32X4 $%d, Z%d, X15", i+2, at(0, 0))
		a.op("VMOVSD X15, 12(DX)")
		a.op("VEXTRACTPS $2, X15, 20(DX)")
		if i == 0 {
			a.op("ADDQ R12, DX")
		}
	}
}

// reduceOneRow keeps two columns in each quarter; the last quarter is not used.
func (t tile) reduceOneRow(a *asm) {
	at := func(j int) int { return t.sum(0, j, 0) }
	gather(a, [4]int{at(0), at(2), at(4), at(4)})
	gather(a, [4]int{at(1), at(3), at(5), at(5)})
	halve(a, 2, at(0), at(1))
	halveOwn(a, at(0))
	for q := range 3 {
		a.op("VEXTRACTF32X4 $%d, Z%d, X24", q, at(0))
		a.op("VMOVSD X24, %d(DX)", 8*q)
	}
}
