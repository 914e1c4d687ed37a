package main

import "fmt"

// weigh is a kernel that adds weighted rows of cols values to accumulators. Registers:
//
//	CX rows of values left    SI weights, R8 and R9 once and three times their stride    DI values, R10 their stride
//	DX accumulators, R12 their stride
//	vector registers from 0: accumulators; then values; the last one a weight in all lanes
type weigh struct {
	isa
	rows, cols int
}

func (w weigh) generate(a *asm) {
	a.function(w.weighName(w.rows, w.cols), 56)
	a.op("MOVQ n+0(FP), CX")
	a.op("MOVQ weights+8(FP), SI")
	a.op("MOVQ weightStride+16(FP), R8")
	a.op("MOVQ values+24(FP), DI")
	a.op("MOVQ valueStride+32(FP), R10")
	a.op("MOVQ acc+40(FP), DX")
	a.op("MOVQ accStride+48(FP), R12")
	a.op("LEAQ (R8)(R8*2), R9")
	a.op("LEAQ (R12)(R12*2), R13")
	regs := w.cols / w.width
	accs := func(format string) {
		for i := range w.rows {
			for c := range regs {
				a.op(format, address("DX", "R12", "R13", i, c*4*w.width), w.reg(i*regs+c))
			}
		}
	}
	accs("VMOVUPS %s, %s")
	loop := a.label()
	first, last := w.rows*regs, w.registers()-1
	for c := range regs {
		a.op("VMOVUPS %d(DI), %s", c*4*w.width, w.reg(first+c))
	}
	for i := range w.rows {
		a.op("VBROADCASTSS %s, %s", address("SI", "R8", "R9", i, 0), w.reg(last))
		for c := range regs {
			a.op("VFMADD231PS %s, %s, %s", w.reg(last), w.reg(first+c), w.reg(i*regs+c))
		}
	}
	a.op("ADDQ $4, SI")
	a.op("ADDQ R10, DI")
	a.op("DECQ CX")
	a.op("JNZ %s", loop)
	accs("VMOVUPS %[2]s, %[1]s")
	a.op("VZEROUPPER")
	a.op("RET")
}

// registers is how many vector registers there are.
func (s isa) registers() int {
	if s.prefix == 'Z' {
		return 32
	}
	return 16
}

// constantNames are the numbers of the exponential, in the order in which they lie in memory, 32 bytes each.
var constantNames = []struct {
	name string
	bits uint32
}{
	{"low", 0xc2ac0000},   // -86
	{"high", 0x42b00000},  // 88
	{"log2e", 0x3fb8aa3b}, // 1.44269504
	{"magic", 0x4b400000}, // 1.5 * 2^23
	{"ln2hi", 0xbf318000}, // -0.693359375
	{"ln2lo", 0x395e8083}, // 2.12194440e-4
	{"exp0", 0x39506967},  // 1.9875691500e-4
	{"exp1", 0x3ab743ce},  // 1.3981999507e-3
	{"exp2", 0x3c088908},  // 8.3334519073e-3
	{"exp3", 0x3d2aa9c1},  // 4.1665795894e-2
	{"exp4", 0x3e2aaaaa},  // 1.6666665459e-1
	{"exp5", 0x3f000000},  // 5.0000001201e-1
	{"one", 0x3f800000},
	{"sign", 0x80000000},
}

func (a *asm) constants() {
	for i, c := range constantNames {
		for at := range 4 {
			a.raw(fmt.Sprintf("DATA expConstants<>+%d(SB)/8, $%#08x%08x\n", 32*i+8*at, c.bits, c.bits))
		}
	}
	a.raw(fmt.Sprintf("GLOBL expConstants<>(SB), RODATA|NOPTR, $%d\n", 32*len(constantNames)))
}

// constant is an operand that holds a constant: a register of AVX-512, which loadConstants fills, or memory for AVX2,
// which has too few.
func (s isa) constant(name string) string {
	for i, c := range constantNames {
		if c.name != name {
			continue
		}
		if s.prefix == 'Z' {
			return fmt.Sprintf("Z%d", 16+i)
		}
		return fmt.Sprintf("expConstants<>+%d(SB)", 32*i)
	}
	panic("asmgen: no constant " + name)
}

func (s isa) loadConstants(a *asm) {
	if s.prefix != 'Z' {
		return
	}
	for i := range constantNames {
		a.op("VBROADCASTSS expConstants<>+%d(SB), Z%d", 32*i, 16+i)
	}
}

// exp replaces register 0 by its exponential, with the operations of exp32; it uses registers 1 to 4.
func (s isa) exp(a *asm) {
	r := s.reg
	if s.prefix == 'Z' {
		a.op("VCMPPS $5, %s, Z0, K1", s.constant("low")) // not below: true for NaN, which stays
	} else {
		a.op("VCMPPS $5, %s, Y0, Y4", s.constant("low"))
	}
	a.op("VMOVUPS %s, %s", s.constant("high"), r(1))
	a.op("VMINPS %s, %s, %s", r(0), r(1), r(0))
	a.op("VMOVUPS %s, %s", s.constant("magic"), r(1)) // t
	a.op("VFMADD231PS %s, %s, %s", s.constant("log2e"), r(0), r(1))
	a.op("VSUBPS %s, %s, %s", s.constant("magic"), r(1), r(2)) // n
	a.op("VFMADD231PS %s, %s, %s", s.constant("ln2hi"), r(2), r(0))
	a.op("VFMADD231PS %s, %s, %s", s.constant("ln2lo"), r(2), r(0)) // r
	a.op("VMOVUPS %s, %s", s.constant("exp0"), r(3))
	for _, c := range []string{"exp1", "exp2", "exp3", "exp4", "exp5"} {
		a.op("VFMADD213PS %s, %s, %s", s.constant(c), r(0), r(3))
	}
	a.op("VMULPS %s, %s, %s", r(0), r(0), r(2))
	a.op("VFMADD213PS %s, %s, %s", r(0), r(2), r(3))
	a.op("VADDPS %s, %s, %s", s.constant("one"), r(3), r(3))
	a.op("VPSLLD $23, %s, %s", r(1), r(1))
	a.op("VPADDD %s, %s, %s", r(1), r(3), r(0))
	if s.prefix == 'Z' {
		a.op("VMOVAPS.Z Z0, K1, Z0")
	} else {
		a.op("VANDPS Y4, Y0, Y0")
	}
}

// softmax finds the largest, then replaces each number by the exponential of its distance and adds them up.
func (s isa) softmax(a *asm) {
	a.function(s.name+"Softmax", 20)
	a.op("MOVQ x+0(FP), SI")
	a.op("MOVQ n+8(FP), CX")
	s.loadConstants(a)
	bytes := 4 * s.width
	a.op("LEAQ (SI)(CX*4), DX") // end
	a.op("MOVQ SI, DI")
	a.op("VMOVUPS (SI), %s", s.reg(5))
	loop := a.label()
	a.op("VMAXPS (DI), %s, %s", s.reg(5), s.reg(5))
	a.op("ADDQ $%d, DI", bytes)
	a.op("CMPQ DI, DX")
	a.op("JNE %s", loop)
	s.fold(a, 5, 0, "VMAXPS")
	a.op("VBROADCASTSS X5, %s", s.reg(5))
	for h := range s.regs() {
		a.op("VXORPS X%d, X%d, X%d", 6+h, 6+h, 6+h)
	}
	loop = a.label()
	for h := range s.regs() {
		a.op("VMOVUPS %d(SI), %s", h*bytes, s.reg(0))
		a.op("VSUBPS %s, %s, %s", s.reg(5), s.reg(0), s.reg(0))
		s.exp(a)
		a.op("VMOVUPS %s, %d(SI)", s.reg(0), h*bytes)
		a.op("VADDPS %s, %s, %s", s.reg(0), s.reg(6+h), s.reg(6+h))
	}
	a.op("ADDQ $64, SI")
	a.op("CMPQ SI, DX")
	a.op("JNE %s", loop)
	s.fold(a, 6, 7, "VADDPS")
	a.op("VMOVSS X6, ret+16(FP)")
	a.op("VZEROUPPER")
	a.op("RET")
}

// fold combines the lanes of register r (and of register upper, if that holds the upper 8) into lane 0, in the order of
// the tree. It uses register 8.
func (s isa) fold(a *asm, r, upper int, op string) {
	if s.prefix == 'Z' {
		a.op("VEXTRACTF64X4 $1, Z%d, Y8", r)
		a.op("%s Y8, Y%d, Y%d", op, r, r)
	} else if upper != 0 {
		a.op("%s Y%d, Y%d, Y%d", op, upper, r, r)
	}
	a.op("VEXTRACTF128 $1, Y%d, X8", r)
	a.op("%s X8, X%d, X%d", op, r, r)
	a.op("VMOVHLPS X%d, X%d, X8", r, r)
	a.op("%s X8, X%d, X%d", op, r, r)
	a.op("VMOVSHDUP X%d, X8", r)
	a.op("%s X8, X%d, X%d", op, r, r)
}

func (s isa) silu(a *asm) {
	a.function(s.name+"SiLU", 24)
	a.op("MOVQ gate+0(FP), SI")
	a.op("MOVQ up+8(FP), DI")
	a.op("MOVQ n+16(FP), CX")
	s.loadConstants(a)
	loop := a.label()
	a.op("VMOVUPS (SI), %s", s.reg(5))
	if s.prefix == 'Z' {
		a.op("VPXORD %s, Z5, Z0", s.constant("sign"))
	} else {
		a.op("VXORPS %s, Y5, Y0", s.constant("sign"))
	}
	s.exp(a)
	a.op("VADDPS %s, %s, %s", s.constant("one"), s.reg(0), s.reg(0))
	a.op("VDIVPS %s, %s, %s", s.reg(0), s.reg(5), s.reg(5))
	a.op("VMULPS (DI), %s, %s", s.reg(5), s.reg(5))
	a.op("VMOVUPS %s, (SI)", s.reg(5))
	a.op("ADDQ $%d, SI", 4*s.width)
	a.op("ADDQ $%d, DI", 4*s.width)
	a.op("SUBQ $%d, CX", s.width)
	a.op("JNZ %s", loop)
	a.op("VZEROUPPER")
	a.op("RET")
}
