package rows

// Sink is what the owner of a ledger asks an engine for. The functions are called on the engine's goroutine and must not
// block.
type Sink struct {
	Node           string // whose it is, in traces
	Interval       int    // a row of every so many iterations; 0: no rows
	KVInterval     int    // KV statistics of every so many: a multiple of Interval
	MaxStepRecords int    // decode steps kept of a request that asks for them
	RequestStats   bool
	AllRanks       bool // ranks gather their rows in rounds of their own
	Put            func(*Row)
	// The newest readings of what some of the node's accelerators use, which are named by their places among all: nil: unknown. Memory
	// is the process's too.
	Memory func(cards []int) Memory
	Energy func(cards []int) (joules float64, ok bool)
	Log    func(line string) // the iteration log; nil: none
}
