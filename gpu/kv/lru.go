package kv

import "fmt"

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

// The classes of cached blocks, by the highest priority of the requests that used them, or by one that pinned them. 0: nobody has
// said one.
const (
	lower = uint8(1 + iota)
	usual
	higher
	pinned
)

// stay is how much longer than others a block of a higher class stays, and how much shorter one of a lower, in times that as many blocks
// as the pool has became cached.
const stay = 4

// pinnedShare is the part of the pool that pinned content may take: of more the longest unused loses its pin.
const pinnedShare = 1. / 2

// classOf is the class of a request's blocks.
func classOf(priority int, pin bool) uint8 {
	switch {
	case pin:
		return pinned
	case priority < 0:
		return lower
	case priority > 0:
		return higher
	}
	return usual
}

// shelves are the cached blocks in the order of their eviction: by the time of their last use, to which their class adds; pinned
// ones come after all others.
type shelves struct {
	lists [pinned + 1]lru // by class; a block is in one of them, so that they share memory
	class []uint8
	since []int64 // tick at which it was added
	tick  int64   // one an addition
	n     int
}

func newShelves(blocks int) shelves {
	s := shelves{class: make([]uint8, blocks), since: make([]int64, blocks)}
	one := newLRU(blocks)
	for i := range s.lists {
		s.lists[i] = one
	}
	return s
}

func (s *shelves) add(id int32, class uint8) {
	if class == 0 {
		class = usual
	}
	s.tick++
	s.n++
	s.class[id], s.since[id] = class, s.tick
	s.lists[class].add(id)
	if l := &s.lists[pinned]; float64(l.n) > pinnedShare*float64(len(s.since)) {
		id := l.oldest
		s.remove(id)
		s.add(id, usual)
	}
}

func (s *shelves) remove(id int32) {
	s.n--
	s.lists[s.class[id]].remove(id)
}

// next is the block to be evicted; none if there is none.
func (s *shelves) next() int32 {
	best, when := none, int64(0)
	for class := lower; class <= higher; class++ {
		id := s.lists[class].oldest
		if id == none {
			continue
		}
		if at := s.since[id] + (int64(class)-int64(usual))*stay*int64(len(s.since)); best == none || at < when {
			best, when = id, at
		}
	}
	if best == none {
		return s.lists[pinned].oldest
	}
	return best
}

// check verifies that each list has blocks of its class, all that there are, and none that must not be there.
func (s *shelves) check(may func(id int32) bool) error {
	n := 0
	for class := range s.lists {
		for id := s.lists[class].oldest; id != none; id = s.lists[class].next[id] {
			if n++; n > s.n || int(s.class[id]) != class || !may(id) {
				return fmt.Errorf("kv: %d is twice in the lists, in one of another class, or not cached", id)
			}
		}
	}
	if n != s.n {
		return fmt.Errorf("kv: %d in the lists of what is cached, the books say %d", n, s.n)
	}
	return nil
}
