package place

const (
	// imbalance is how far over the mean load a node may be and still keep its conversations.
	imbalance = 1.25
	// sequenceSlack is allowed on top, so that a nearly idle cluster does not break conversations up.
	sequenceSlack = 4
)

// sticky takes the node that the conversation's key prefers among those whose load is within the bound: rendezvous hashing
// with bounded loads. It remembers nothing, so that all routers agree, and a node that joins or leaves moves only the
// conversations that it gains or had.
func (c *Chooser) sticky(side Side, nodes []Node, q *Query) int {
	sum := 0.0
	for _, s := range c.scores {
		sum += s
	}
	slack := float64(q.Tokens) // a prefill may wait as long as itself takes
	if side == Decode {
		slack = sequenceSlack
	}
	bound := imbalance*sum/float64(len(c.scores)) + slack
	best, at := uint64(0), -1
	for i, s := range c.scores {
		if s > bound {
			continue
		}
		if w := mix(q.Key ^ nodes[c.looked[i]].Seed); at < 0 || w > best {
			best, at = w, i
		}
	}
	return c.looked[at] // the least loaded node is always within the bound
}

// SeedOf is the seed of a node's name, or the key of a conversation's. It is never 0.
func SeedOf(name string) uint64 {
	h := uint64(0xcbf29ce484222325) // FNV-1a
	for i := range len(name) {
		h = (h ^ uint64(name[i])) * 0x100000001b3
	}
	return mix(h) | 1
}

// mix is the finalizer of SplitMix64.
func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
