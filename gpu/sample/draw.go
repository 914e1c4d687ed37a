package sample

import "math"

// candidate is a token with its logit over temperature, relative to the largest one, so w <= 0 and exp(w) <= 1.
type candidate struct {
	w     float64
	token int32
}

// before is the order of candidates: more likely first, then lower id.
func (a candidate) before(b candidate) bool {
	return a.w > b.w || (a.w == b.w && a.token < b.token)
}

// draw chooses among the tokens that the filters leave, best being the most likely one.
//
// It is a Gumbel-max draw: argmax of w[i] + g[i] with g[i] = -log(-log(u[i])) and u a hash of (seed, position, token).
// Unlike a walk along the cumulative distribution, a small change of one logit cannot push the choice to a
// neighbour in id, and filters do not move the noise of the tokens that stay.
func (s *State) draw(row []float32, best int32, position int, sc *Scratch) int32 {
	top, temperature := float64(row[best]), float64(s.sampling.Temperature)
	if math.IsInf(top, 1) {
		return best // an infinite logit or bias is certainty
	}
	key := mix(mix(s.sampling.Seed) ^ uint64(position))
	d := drawer{key: key, token: best, score: gumbel(key, best)}
	floor := minW(s.sampling.MinP)
	if s.sampling.TopK <= 0 && (s.sampling.TopP <= 0 || s.sampling.TopP >= 1) {
		for i, l := range row {
			if w := (float64(l) - top) / temperature; w >= floor {
				d.offer(candidate{w, int32(i)})
			}
		}
		return d.token
	}
	heap := sc.heap[:0]
	for i, l := range row {
		if w := (float64(l) - top) / temperature; w > math.Inf(-1) { // false for NaN too
			heap = append(heap, candidate{w, int32(i)})
		}
	}
	sc.heap = heap
	for _, c := range nucleus(heap, s.sampling.TopK, float64(s.sampling.TopP)) {
		if c.w >= floor {
			d.offer(c)
		}
	}
	return d.token
}

// minW is the smallest w that min-p leaves: p >= minP * pmax is w >= log(minP).
func minW(minP float32) float64 {
	if minP <= 0 {
		return -math.MaxFloat64
	}
	return min(math.Log(float64(minP)), 0)
}

// drawer keeps the best score so far.
type drawer struct {
	key   uint64
	score float64
	token int32
}

// maxGumbel is the largest value of gumbel: u is at most 1 - 2^-33, so -log(-log(u)) < 23.
const maxGumbel = 23

func (d *drawer) offer(c candidate) {
	if c.w+maxGumbel < d.score {
		return // cannot win: spares the logarithms of nearly the whole vocabulary
	}
	score := c.w + gumbel(d.key, c.token)
	if score > d.score || (score == d.score && c.token < d.token) {
		d.score, d.token = score, c.token
	}
}

// gumbel is the noise of one token at one position: standard Gumbel, from 32 bits of hash.
func gumbel(key uint64, token int32) float64 {
	u := (float64(mix(key^uint64(uint32(token)))>>32) + 0.5) / (1 << 32)
	return -math.Log(-math.Log(u))
}

// mix is the output function of SplitMix64 (Steele, Lea, Flood 2014) over one step of its sequence.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// nucleus returns the k most likely candidates (all when k <= 0) and of these the fewest whose probabilities, normalized
// over the k, reach p (all when p is off). It reorders the heap; the result is sorted and lies in the same memory.
func nucleus(heap []candidate, k int, p float64) []candidate {
	n := len(heap)
	if k <= 0 || k > n {
		k = n
	}
	off := p <= 0 || p >= 1
	total := 0.0
	if !off && k == n { // summed before the order is lost, in the order of ids
		for _, c := range heap {
			total += math.Exp(c.w)
		}
	}
	for i := n/2 - 1; i >= 0; i-- {
		sink(heap, i)
	}
	want := p * total
	sum := 0.0
	taken := 0
	for taken < k && (off || k < n || taken == 0 || sum < want) {
		last := n - 1 - taken
		heap[0], heap[last] = heap[last], heap[0]
		sink(heap[:last], 0)
		sum += math.Exp(heap[last].w)
		taken++
	}
	out := heap[n-taken:]
	reverse(out)
	if !off && k < n {
		out = out[:reach(out, p*sum)]
	}
	return out
}

// reach is how many of the sorted candidates are needed until their weights sum up to want; at least one.
func reach(sorted []candidate, want float64) int {
	sum := 0.0
	for i, c := range sorted {
		sum += math.Exp(c.w)
		if sum >= want {
			return i + 1
		}
	}
	return len(sorted)
}

func reverse(c []candidate) {
	for i, j := 0, len(c)-1; i < j; i, j = i+1, j-1 {
		c[i], c[j] = c[j], c[i]
	}
}

// sink restores the heap below i: a parent comes before its children.
func sink(heap []candidate, i int) {
	for {
		child := 2*i + 1
		if child >= len(heap) {
			return
		}
		if r := child + 1; r < len(heap) && heap[r].before(heap[child]) {
			child = r
		}
		if !heap[child].before(heap[i]) {
			return
		}
		heap[i], heap[child] = heap[child], heap[i]
		i = child
	}
}
