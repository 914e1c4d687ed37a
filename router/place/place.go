// Package place decides which node of a list serves a request. It is pure: a table of what is known of the nodes in, an
// index out; no clock, no lock, no membership (router/pool owns those) and no prefix index (router/prefix does).
//
// Formulae and units are in docs/routing.md.
package place

import "math"

// Policy is how one node of a role is chosen.
type Policy string

// The policies.
const (
	RoundRobin   Policy = "round_robin"  // in turn, whatever the load
	LeastLoaded  Policy = "least_loaded" // lowest load
	PowerOfTwo   Policy = "power_of_two" // the less loaded of two that are drawn
	KVAware      Policy = "kv_aware"     // lowest load plus what must be computed or moved
	Conversation Policy = "conversation" // always the same node for a conversation, within a bound on imbalance
)

// Policies lists them, as options name them.
func Policies() []Policy {
	return []Policy{RoundRobin, LeastLoaded, PowerOfTwo, KVAware, Conversation}
}

// Matches tells whether the policy looks at the cached prefix of a prompt.
func (p Policy) Matches() bool { return p == KVAware }

// Side is the part of a request that a node is chosen for; it fixes the unit of scores.
type Side int

const (
	// Prefill scores are prompt tokens: what waits on the node before this request, and what the policy adds.
	Prefill Side = iota
	// Decode scores are sequences: those that run or wait on the node, and fractions for KV.
	Decode
)

// Rank says whether a node may be chosen. Those of a higher rank are chosen only where there is none of a lower.
type Rank uint8

// The ranks.
const (
	Good     Rank = iota
	Unproven      // no generation has gone through it yet
	Avoided       // its breaker is open, or a leg could not reach it
	Excluded      // never
)

// Node is what is known of a node. Counts are what it reported plus what was reserved since.
type Node struct {
	Name         string
	Seed         uint64  // of the name, see SeedOf
	QueuedTokens int     // prompt tokens that are not prefilled yet
	Sequences    int     // running and waiting
	KVUsedTokens int     // room of the KV blocks that requests hold
	KVMaxTokens  int     // 0: not known
	PairTokens   float64 // cost of the hand-over to the chosen generation node over the cheapest one, as prompt tokens
	Slot         int     // of Query.Held; negative: none
	Rank         Rank
}

// Query is one request.
type Query struct {
	Tokens int             // of the prompt
	Key    uint64          // of the conversation; 0: none
	Turn   int             // rises with each choice: equal nodes take turns
	Rand   func(n int) int // uniform in [0, n)
	Held   []int32         // tokens of the prompt whose KV a node holds, by its slot; slots beyond hold none
}

// Matched is how many tokens of the prompt a node need not compute. The last one always is: its logits are wanted.
func (q *Query) Matched(n *Node) int {
	if uint(n.Slot) >= uint(len(q.Held)) {
		return 0
	}
	return min(int(q.Held[n.Slot]), q.Tokens-1)
}

// Chooser holds the scores of the last choice. Its memory is reused; one goroutine at a time.
type Chooser struct {
	scores []float64
	looked []int // indexes of the nodes that were looked at
}

// Choose returns the index of the node that the policy takes; false when no node may be chosen.
func (c *Chooser) Choose(p Policy, side Side, nodes []Node, q *Query) (int, bool) {
	if !c.score(p, side, nodes, q) {
		return 0, false
	}
	switch {
	case p == RoundRobin:
		return c.looked[q.Turn%len(c.looked)], true
	case p == PowerOfTwo:
		return c.two(q), true
	case p == Conversation && q.Key != 0:
		return c.sticky(side, nodes, q), true
	}
	return c.least(q), true
}

// score lists the nodes of the best rank that occurs, and scores them; false: none may be chosen.
func (c *Chooser) score(p Policy, side Side, nodes []Node, q *Query) bool {
	c.looked, c.scores = c.looked[:0], c.scores[:0]
	rank := Excluded
	for i := range nodes {
		n := &nodes[i]
		switch {
		case n.Rank > rank || n.Rank == Excluded:
			continue
		case n.Rank < rank:
			rank, c.looked = n.Rank, c.looked[:0]
		}
		c.looked = append(c.looked, i)
	}
	if side == Prefill {
		for _, i := range c.looked {
			c.scores = append(c.scores, nodes[i].prefillScore(p, q))
		}
		return rank != Excluded
	}
	perToken := 0.0
	if p == KVAware && q.Tokens > 0 {
		perToken = matchWeight(nodes, c.looked) / float64(q.Tokens)
	}
	for _, i := range c.looked {
		c.scores = append(c.scores, nodes[i].decodeScore(perToken, q))
	}
	return rank != Excluded
}

func (n *Node) prefillScore(p Policy, q *Query) float64 {
	s := float64(n.QueuedTokens) + n.PairTokens
	if p == KVAware {
		s += float64(q.Tokens - q.Matched(n))
	}
	return s
}

// fullPenalty is how many sequences a node counts for whose KV lacks room of one whole cache.
const fullPenalty = 64

// matchWeight is how many sequences a prompt counts for of which a node holds nothing: as many as a node may be ahead of the
// mean and keep its conversations. Less would break conversations up for a load that is uneven by a few sequences.
func matchWeight(nodes []Node, looked []int) float64 {
	sum := 0
	for _, i := range looked {
		sum += nodes[i].Sequences
	}
	return (imbalance-1)*float64(sum)/float64(max(len(looked), 1)) + sequenceSlack
}

// decodeScore is the load of a node, and perToken for what it lacks of the prompt; 0: what it has does not matter.
func (n *Node) decodeScore(perToken float64, q *Query) float64 {
	s := float64(n.Sequences)
	need := q.Tokens
	if perToken > 0 {
		need -= q.Matched(n)
		s += perToken * float64(need)
	}
	if n.KVMaxTokens > 0 {
		share := float64(n.KVUsedTokens+need) / float64(n.KVMaxTokens)
		if s += share; share > 1 {
			s += (fullPenalty - 1) * (share - 1)
		}
	}
	return s
}

// least takes the lowest score; equal ones take turns.
func (c *Chooser) least(q *Query) int {
	start := q.Turn % len(c.looked)
	at, lowest := start, c.scores[start]
	for i, s := range c.scores[start:] {
		if s < lowest {
			at, lowest = start+i, s
		}
	}
	for i, s := range c.scores[:start] {
		if s < lowest {
			at, lowest = i, s
		}
	}
	return c.looked[at]
}

// two draws two nodes, takes the better and forgets the others.
func (c *Chooser) two(q *Query) int {
	n := len(c.looked)
	if n == 1 {
		return c.looked[0]
	}
	a, b := q.Rand(n), q.Rand(n-1)
	if b >= a {
		b++
	}
	if c.scores[b] < c.scores[a] {
		a, b = b, a
	}
	c.looked = append(c.looked[:0], c.looked[a], c.looked[b])
	c.scores = append(c.scores[:0], c.scores[a], c.scores[b])
	return c.looked[0]
}

// Candidate is a node that was looked at.
type Candidate struct {
	At    int
	Score float64
}

// Best appends the k nodes with the lowest scores of the last choice to dst, best first, the chosen one always among them.
func (c *Chooser) Best(dst []Candidate, chosen, k int) []Candidate {
	start, worst := len(dst), math.Inf(1)
	for i, s := range c.scores {
		full := len(dst)-start == k
		if s >= worst && full {
			continue
		}
		if !full {
			dst = append(dst, Candidate{})
		}
		j := len(dst) - 1
		for ; j > start && s < dst[j-1].Score; j-- {
			dst[j] = dst[j-1]
		}
		dst[j] = Candidate{c.looked[i], s}
		worst = dst[len(dst)-1].Score
	}
	for _, x := range dst[start:] {
		if x.At == chosen {
			return dst
		}
	}
	for i, at := range c.looked {
		if at == chosen {
			dst[len(dst)-1] = Candidate{at, c.scores[i]}
		}
	}
	return dst
}

// Looked is the number of nodes that the last choice looked at.
func (c *Chooser) Looked() int { return len(c.looked) }
