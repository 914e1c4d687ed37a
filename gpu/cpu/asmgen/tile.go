package main

import "fmt"

// tile is a kernel for mr x nr dot products. Registers:
//
//	SI x row 0, R8 and R9 once and three times its stride    DI w row 0, R11 w row 3, R10 the stride of w
//	DX out row 0, R12 its stride                             CX bytes of x left
//	vector registers from 0: sums, 16 lanes each; then w; the last two x
type tile struct {
	isa
	dtype  string
	mr, nr int
}

// clearing is the exclusive or that the instruction set has: VXORPS of a Z register would need AVX512DQ.
var clearing = map[byte]string{'Z': "VPXORD", 'Y': "VXORPS"}

// sum is the register of half h of the lanes of output (i, j).
func (t tile) sum(i, j, h int) int { return (i*t.nr+j)*t.regs() + h }

func (t tile) elementSize() int {
	if t.dtype == "F32" {
		return 4
	}
	return 2
}

func (t tile) generate(a *asm) {
	a.function(t.tileName(t.dtype, t.mr, t.nr), 56)
	a.op("MOVQ k+0(FP), CX")
	a.op("MOVQ x+8(FP), SI")
	a.op("MOVQ xStride+16(FP), R8")
	a.op("MOVQ w+24(FP), DI")
	a.op("MOVQ wStride+32(FP), R10")
	a.op("MOVQ out+40(FP), DX")
	a.op("MOVQ outStride+48(FP), R12")
	a.op("SHLQ $2, CX")
	a.op("LEAQ (R8)(R8*2), R9")
	a.op("LEAQ (R10)(R10*2), R11")
	a.op("ADDQ DI, R11")
	for r := range t.mr * t.nr * t.regs() {
		a.op("%s %[2]s, %[2]s, %[2]s", clearing[t.prefix], t.reg(r))
	}
	loop := a.label()
	for h := range t.regs() {
		t.step(a, h)
	}
	a.op("ADDQ $64, SI")
	a.op("ADDQ $%d, DI", 16*t.elementSize())
	a.op("ADDQ $%d, R11", 16*t.elementSize())
	a.op("SUBQ $64, CX")
	a.op("JNZ %s", loop)
	if t.prefix == 'Z' && t.mr == 4 && t.nr == 6 {
		t.reduceAll(a)
	} else {
		t.reduceEach(a)
	}
	a.op("VZEROUPPER")
	a.op("RET")
}

// step multiplies half h of 16 elements.
func (t tile) step(a *asm, h int) {
	first := t.mr * t.nr * t.regs()
	if t.prefix == 'Z' {
		for j := range t.nr {
			t.load(a, j, h, first+j)
		}
		for i := range t.mr {
			x := 30 + i%2
			a.op("VMOVUPS %s, %s", address("SI", "R8", "R9", i, 0), t.reg(x))
			for j := range t.nr {
				a.op("VFMADD231PS %s, %s, %s", t.reg(x), t.reg(first+j), t.reg(t.sum(i, j, h)))
			}
		}
		return
	}
	for i := range t.mr { // 16 registers: one for w at a time
		a.op("VMOVUPS %s, %s", address("SI", "R8", "R9", i, 32*h), t.reg(14+i))
	}
	for j := range t.nr {
		w := first + j%2
		t.load(a, j, h, w)
		for i := range t.mr {
			a.op("VFMADD231PS %s, %s, %s", t.reg(14+i), t.reg(w), t.reg(t.sum(i, j, h)))
		}
	}
}

// load widens half h of 16 elements of row j of w into register r.
func (t tile) load(a *asm, j, h, r int) {
	base := "DI"
	if j >= 3 {
		base, j = "R11", j-3
	}
	from := address(base, "R10", "", j, h*t.width*t.elementSize())
	switch t.dtype {
	case "F32":
		a.op("VMOVUPS %s, %s", from, t.reg(r))
	case "F16":
		a.op("VCVTPH2PS %s, %s", from, t.reg(r))
	default:
		a.op("VPMOVZXWD %s, %s", from, t.reg(r))
		a.op("VPSLLD $16, %s, %s", t.reg(r), t.reg(r))
	}
}

// address is base + i strides + offset, where stride3 holds three strides.
func address(base, stride, stride3 string, i, offset int) string {
	switch i {
	case 0:
		return fmt.Sprintf("%d(%s)", offset, base)
	case 3:
		return fmt.Sprintf("%d(%s)(%s*1)", offset, base, stride3)
	}
	return fmt.Sprintf("%d(%s)(%s*%d)", offset, base, stride, i)
}

// reduceEach adds the lanes of each output alone: l and l+8, l+4, l+2, l+1.
func (t tile) reduceEach(a *asm) {
	for i := range t.mr {
		for j := range t.nr {
			s := t.sum(i, j, 0)
			if t.prefix == 'Z' {
				a.op("VEXTRACTF64X4 $1, Z%d, Y31", s)
				a.op("VADDPS Y31, Y%d, Y%d", s, s)
			} else {
				a.op("VADDPS Y%d, Y%d, Y%d", s+1, s, s)
			}
			t.reduceHalf(a, s)
			a.op("VMOVSS X%d, %d(DX)", s, 4*j)
		}
		if i < t.mr-1 {
			a.op("ADDQ R12, DX")
		}
	}
}

// reduceHalf adds 8 lanes. Outputs of mr x nr tiles other than the largest stay below register 16, so that the VEX forms
// can be used.
func (t tile) reduceHalf(a *asm, s int) {
	a.op("VEXTRACTF128 $1, Y%d, X15", s)
	a.op("VADDPS X15, X%d, X%d", s, s)
	a.op("VMOVHLPS X%d, X%d, X15", s, s)
	a.op("VADDPS X15, X%d, X%d", s, s)
	a.op("VMOVSHDUP X%d, X15", s)
	a.op("VADDSS X15, X%d, X%d", s, s)
}

// reduceAll adds the lanes of 4 x 6 outputs together, in the same tree, with a third of the instructions: each step adds
// the halves of two registers and keeps the results in one. Registers 24 and 25 are free.
func (t tile) reduceAll(a *asm) {
	pair := func(split func(x, y int), x, y int) { // x = low halves + high halves of x and y
		split(x, y)
		a.op("VADDPS Z25, Z24, Z%d", x)
	}
	shuffle := func(lo, hi int) func(x, y int) {
		return func(x, y int) {
			a.op("VSHUFF64X2 $%#x, Z%d, Z%d, Z24", lo, y, x)
			a.op("VSHUFF64X2 $%#x, Z%d, Z%d, Z25", hi, y, x)
		}
	}
	unpack := func(suffix string) func(x, y int) {
		return func(x, y int) {
			a.op("VUNPCKL%s Z%d, Z%d, Z24", suffix, y, x)
			a.op("VUNPCKH%s Z%d, Z%d, Z25", suffix, y, x)
		}
	}
	for j := range 6 { // afterwards sum(0, j) holds 4 lanes of column j for each row
		pair(shuffle(0x44, 0xee), t.sum(0, j, 0), t.sum(1, j, 0))
		pair(shuffle(0x44, 0xee), t.sum(2, j, 0), t.sum(3, j, 0))
		pair(shuffle(0x88, 0xdd), t.sum(0, j, 0), t.sum(2, j, 0))
	}
	for j := 0; j < 6; j += 2 {
		pair(unpack("PS"), t.sum(0, j, 0), t.sum(0, j+1, 0))
	}
	wide, narrow := t.sum(0, 0, 0), t.sum(0, 4, 0)
	pair(unpack("PD"), wide, t.sum(0, 2, 0))
	a.op("VPERMILPS $0x4e, Z%d, Z24", narrow)
	a.op("VADDPS Z24, Z%d, Z%d", narrow, narrow)
	for i := range 4 {
		a.op("VEXTRACTF32X4 $%d, Z%d, (DX)", i, wide)
		a.op("VEXTRACTF32X4 $%d, Z%d, X24", i, narrow)
		a.op("VMOVSD X24, 16(DX)")
		if i < 3 {
			a.op("ADDQ R12, DX")
		}
	}
}
