package main

import "fmt"

// tile is a kernel for mr x nr dot products. Registers:
//
//	SI x row 0, R8 and R9 once and three times its stride    DI w row 0, R11 w row 3, R10 the stride of w
//	DX out row 0, R12 its stride                             CX bytes of x left
//	R13 what to prefetch for w row 0, R14 for row 3
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
	if t.prefetches() {
		t.prefetchSetup(a)
	}
	for r := range t.mr * t.nr * t.regs() {
		a.op("%s %[2]s, %[2]s, %[2]s", clearing[t.prefix], t.reg(r))
	}
	loop := a.label()
	for h := range t.regs() {
		t.step(a, h)
	}
	if t.prefetches() {
		t.prefetch(a)
	}
	a.op("ADDQ $64, SI")
	a.op("ADDQ $%d, DI", 16*t.elementSize())
	a.op("ADDQ $%d, R11", 16*t.elementSize())
	a.op("SUBQ $64, CX")
	a.op("JNZ %s", loop)
	if t.prefix == 'Z' && t.nr == 6 {
		t.reduceSix(a)
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
