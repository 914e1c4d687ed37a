package kv

// lru is a list of block numbers by age; a number is in it at most once.
type lru struct {
	prev, next     []int32
	oldest, newest int32
	n              int
}

func newLRU(blocks int) lru {
	return lru{prev: make([]int32, blocks), next: make([]int32, blocks), oldest: none, newest: none}
}

// add makes a block the newest.
func (l *lru) add(id int32) {
	l.prev[id], l.next[id] = l.newest, none
	if l.newest == none {
		l.oldest = id
	} else {
		l.next[l.newest] = id
	}
	l.newest = id
	l.n++
}

func (l *lru) remove(id int32) {
	prev, next := l.prev[id], l.next[id]
	if prev == none {
		l.oldest = next
	} else {
		l.next[prev] = next
	}
	if next == none {
		l.newest = prev
	} else {
		l.prev[next] = prev
	}
	l.n--
}
