package cpu

import (
	"math"
	"unsafe"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

// tileRows is how many query rows (tokens times the query heads of one KV head) share a walk over the keys.
const tileRows = 8

// attentionTask is some neighbouring rows of one entry with one KV head.
type attentionTask struct {
	entry, first, rows, kvHead int
}

// attention replaces d.query by its attention over the KV of layer.
func (d *device) attention(b *backend.Batch, layer int) {
	group := d.config.Heads / d.config.KVHeads
	perTask := max(tileRows/group, 1)
	tasks, work := d.tasks[:0], 0
	for first := 0; first < len(d.rows); {
		end := first + 1
		for end < len(d.rows) && d.rows[end].entry == d.rows[first].entry && end-first < perTask {
			end++
		}
		for h := range d.config.KVHeads {
			tasks = append(tasks, attentionTask{d.rows[first].entry, first, end - first, h})
		}
		work += (end - first) * d.rows[end-1].pos * 2 * d.query.cols
		first = end
	}
	d.tasks = tasks
	d.pool.run(len(tasks), work, func(worker, i int) {
		a := attender{
			device: d, table: d.kv.table(&b.Entries[tasks[i].entry], layer), layer: layer, window: d.layers[layer].window,
			group: group, task: tasks[i], scratch: &d.scratch[worker],
		}
		a.run()
	})
}

// attender is one task at work. A tile row is one query head of one query token: token * group + head of the group.
type attender struct {
	*device
	table         []int32 // of blocks
	layer, window int
	group         int
	task          attentionTask
	scratch       *scratch
}

func (a *attender) run() {
	last := a.rows[a.task.first+a.task.rows-1].pos
	base := a.visible(a.rows[a.task.first].pos) / a.kv.tokens * a.kv.tokens
	a.loadQueries()
	a.score(base, last+1)
	for t := range a.task.rows {
		a.weighValues(t, base)
	}
}

// visible is the first position that a query at pos sees.
func (a *attender) visible(pos int) int {
	if a.window == 0 {
		return 0
	}
	return max(pos-a.window+1, 0)
}

// head gives the place of one query head of row t of the task in d.query.
func (a *attender) head(t, g int) []float32 {
	size := a.config.HeadSize
	at := (a.task.kvHead*a.group + g) * size
	return a.query.row(a.task.first + t)[at : at+size]
}

// loadQueries copies the queries of the tile one behind the other, scaled by 1/sqrt(head size).
func (a *attender) loadQueries() {
	scale := float32(1 / math.Sqrt(float64(a.config.HeadSize)))
	q := &a.scratch.query
	q.resize(a.task.rows * a.group)
	for t := range a.task.rows {
		for g := range a.group {
			out := q.row(t*a.group + g)
			for i, v := range a.head(t, g) {
				out[i] = v * scale
			}
		}
	}
}

// score fills scratch.scores, whose column 0 is position base, up to position end. Columns that a row must not see hold
// scores too; weighValues takes only those it may.
func (a *attender) score(base, end int) {
	q, s := &a.scratch.query, &a.scratch.scores
	s.cols = pad(end-base) + lanes // room for the padding behind a row's last position
	s.resize(a.task.rows * a.group)
	for pos := base; pos < end; pos += a.kv.tokens {
		keys := a.kv.head(a.table[pos/a.kv.tokens], a.layer, 0, a.task.kvHead)
		a.ks.tile(tileArgs{
			k: q.cols, dtype: model.F32, x: &q.data[0], xStride: 4 * q.cols, m: a.task.rows * a.group,
			w: unsafe.Pointer(&keys[0]), wStride: 4 * a.kv.headStride, n: min(a.kv.tokens, end-pos),
			out: &s.data[pos-base], outStride: 4 * s.cols,
		})
	}
}

// weighValues turns the scores of one query token into weights and sums the values, for all heads of its group.
func (a *attender) weighValues(t, base int) {
	pos := a.rows[a.task.first+t].pos
	from := a.visible(pos)
	s, acc := &a.scratch.scores, &a.scratch.acc
	acc.resize(a.group)
	clear(acc.data)
	inverse := a.scratch.inverse[:0]
	for g := range a.group {
		row := s.row(t*a.group + g)[from-base:]
		n := pad(pos + 1 - from)
		for i := pos + 1 - from; i < n; i++ {
			row[i] = float32(math.Inf(-1))
		}
		inverse = append(inverse, 1/a.ks.softmax(&row[0], n))
	}
	for at := from; at <= pos; {
		in := at % a.kv.tokens
		n := min(a.kv.tokens-in, pos+1-at)
		values := a.kv.head(a.table[at/a.kv.tokens], a.layer, 1, a.task.kvHead)
		a.weigh(n, &s.row(t * a.group)[at-base], &values[in*a.kv.headStride])
		at += n
	}
	for g, inv := range inverse {
		sum := acc.row(g)
		for i := range a.head(t, g) {
			a.head(t, g)[i] = sum[i] * inv
		}
	}
}

// weigh adds n weighted values to the accumulators of all heads of the group.
func (a *attender) weigh(n int, weights, values *float32) {
	ks, acc := a.ks, &a.scratch.acc
	stride := 4 * a.scratch.scores.cols
	for g, i := 0, 0; g < a.group; g += ks.wr[i] {
		for ks.wr[i] > a.group-g {
			i++
		}
		w := (*float32)(unsafe.Add(unsafe.Pointer(weights), g*stride))
		for c, j := 0, 0; c < acc.cols; c += ks.wc[j] {
			for ks.wc[j] > acc.cols-c {
				j++
			}
			v := (*float32)(unsafe.Add(unsafe.Pointer(values), 4*c))
			ks.weigh[i][j](n, w, stride, v, 4*a.kv.headStride, &acc.row(g)[c], 4*acc.cols)
		}
	}
}
