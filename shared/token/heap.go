package token

// candidate is a pair that can be joined: its merge, and the place of its left symbol.
type candidate struct {
	val uint64
	pos int32
}

func (c candidate) before(o candidate) bool {
	return c.val < o.val || c.val == o.val && c.pos < o.pos
}

// pairHeap is a binary heap; container/heap would call through an interface and allocate for each element.
type pairHeap []candidate

func (h pairHeap) init() {
	for i := len(h)/2 - 1; i >= 0; i-- {
		h.down(i)
	}
}

// push adds a candidate, unless its pair has no merge.
func (h *pairHeap) push(val uint64, pos int32) {
	if val == noMerge {
		return
	}
	*h = append(*h, candidate{val, pos})
	a := *h
	for i := len(a) - 1; i > 0; {
		parent := (i - 1) / 2
		if !a[i].before(a[parent]) {
			return
		}
		a[i], a[parent] = a[parent], a[i]
		i = parent
	}
}

// pop removes the first candidate.
func (h *pairHeap) pop() candidate {
	a := *h
	top, last := a[0], len(a)-1
	a[0] = a[last]
	*h = a[:last]
	h.down(0)
	return top
}

func (h pairHeap) down(i int) {
	for {
		child := 2*i + 1
		if child >= len(h) {
			return
		}
		if child+1 < len(h) && h[child+1].before(h[child]) {
			child++
		}
		if !h[child].before(h[i]) {
			return
		}
		h[i], h[child] = h[child], h[i]
		i = child
	}
}
