package cpu

import (
	"unsafe"

	"meridian.internal/gpu/model"
)

// weight is a matrix of the model as the kernels read it.
type weight struct {
	data   unsafe.Pointer // (rows, stride): element (i, j) is column j of row i
	dtype  model.DType
	rows   int // outputs
	cols   int // inputs, padded to lanes
	stride int // bytes from row to row
}

// newWeight uses the tensor where it lies. Only if its rows are not whole lanes are they copied, with zeros behind them:
// kernels without tails are simpler and faster, and no published model has such rows.
func newWeight(t *model.Tensor) weight {
	rows, cols, size := t.Shape[0], t.Shape[1], t.Type.Size()
	w := weight{dtype: t.Type, rows: rows, cols: pad(cols), stride: pad(cols) * size}
	if w.cols == cols {
		w.data = unsafe.Pointer(unsafe.SliceData(t.Data))
		return w
	}
	words := make([]uint32, rows*w.stride/4) // pad(cols)*2 bytes is a multiple of 4
	w.data = unsafe.Pointer(unsafe.SliceData(words))
	padded := unsafe.Slice((*byte)(w.data), rows*w.stride)
	for i := range rows {
		copy(padded[i*w.stride:], t.Data[i*cols*size:(i+1)*cols*size])
	}
	return w
}

// matrix is activations: rows of cols elements, cols a multiple of lanes, zeros behind the elements that mean something.
type matrix struct {
	data []float32
	cols int
}

func (m *matrix) row(i int) []float32 { return m.data[i*m.cols : (i+1)*m.cols] }

// resize gives the matrix room for rows; what it held is lost. New memory is zero, and nothing writes the padding.
func (m *matrix) resize(rows int) {
	if n := rows * m.cols; n > cap(m.data) {
		m.data = make([]float32, n)
	} else {
		m.data = m.data[:n]
	}
}

// product is out = x wᵀ for the first m rows of x.
type product struct {
	x   *matrix
	w   *weight
	out *matrix
}

// part computes rows [m0, m1) and columns [n0, n1) of a product.
func (ks *kernels) part(p product, m0, m1, n0, n1 int) {
	ks.tile(tileArgs{
		k: p.w.cols, dtype: p.w.dtype,
		x: &p.x.data[m0*p.x.cols], xStride: 4 * p.x.cols, m: m1 - m0,
		w: unsafe.Add(p.w.data, n0*p.w.stride), wStride: p.w.stride, n: n1 - n0,
		out: &p.out.data[m0*p.out.cols+n0], outStride: 4 * p.out.cols,
	})
}

// tileArgs is an m x n tile of dot products; strides are in bytes.
type tileArgs struct {
	k                           int
	dtype                       model.DType
	x                           *float32
	w                           unsafe.Pointer
	out                         *float32
	xStride, wStride, outStride int
	m, n                        int
}

// tile cuts an m x n tile into those that the kernels have. The rows of x go round inside, so that a panel of weights
// is read from memory once.
func (ks *kernels) tile(a tileArgs) {
	table := ks.tiles[a.dtype]
	for j, jj := 0, 0; j < a.n; j += ks.nr[jj] {
		for ks.nr[jj] > a.n-j {
			jj++
		}
		w := unsafe.Add(a.w, j*a.wStride)
		for i, ii := 0, 0; i < a.m; i += ks.mr[ii] {
			for ks.mr[ii] > a.m-i {
				ii++
			}
			x := (*float32)(unsafe.Add(unsafe.Pointer(a.x), i*a.xStride))
			out := (*float32)(unsafe.Add(unsafe.Pointer(a.out), i*a.outStride+4*j))
			table[ii][jj](a.k, x, a.xStride, w, a.wStride, out, a.outStride)
		}
	}
}

// dot is the dot product of two rows of whole lanes.
func (ks *kernels) dot(x, y []float32) float32 {
	var out float32
	ks.tile(tileArgs{k: len(x), dtype: model.F32, x: &x[0], w: unsafe.Pointer(&y[0]), out: &out, m: 1, n: 1})
	return out
}

// A part of a product works on at most panelBytes of weights, counted in float32, and on xBytes of activations (but on 32
// rows at least): both fit a second-level cache of 1 MB beside each other. Measured at k = 512 to 14,336; the optimum is
// flat.
const (
	panelBytes = 256 << 10
	xBytes     = 256 << 10
)

// multiply runs products over the same m rows of x on all threads.
func (d *device) multiply(m int, products ...product) {
	work := 0
	for _, p := range products {
		work += m * p.w.rows * p.w.cols
	}
	parts := d.parts[:0]
	for _, p := range products {
		// Enough parts to share evenly, few enough that a part is worth handing over.
		cols := max(panelBytes/(4*p.w.cols), 6)
		if share := p.w.rows / (4 * d.pool.size()); share < cols {
			cols = max(share, 1)
		}
		cols = (cols + 11) / 12 * 12
		rowsPerPart := min(max(xBytes/(4*p.w.cols)&^3, 32), 128)
		for m0 := 0; m0 < m; m0 += rowsPerPart {
			for n0 := 0; n0 < p.w.rows; n0 += cols {
				parts = append(parts, productPart{p, m0, min(m0+rowsPerPart, m), n0, min(n0+cols, p.w.rows)})
			}
		}
	}
	d.parts = parts
	d.pool.run(len(parts), work, func(_, i int) {
		p := &parts[i]
		d.ks.part(p.product, p.m0, p.m1, p.n0, p.n1)
	})
}

type productPart struct {
	product
	m0, m1, n0, n1 int
}
