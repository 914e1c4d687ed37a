package rows

// Sink is what the owner of a ledger asks an engine for. The functions are called on the engine's goroutine and must not
// block.
type Sink struct {
	Node           string // whose it is, in traces
	Interval       int    // a row of every so many iterations; 0: no rows
	KVInterval     int    // KV statistics of every so many: a multiple of Interval
	MaxStepRecords int    // decode steps kept of a request that asks for them
	RequestStats   bool
	Put            func(*Row)
	Memory         func() Memory                    // nil: unknown
	Energy         func() (joules float64, ok bool) // of the device, newest reading; nil: unknown
	Log            func(line string)                // the iteration log; nil: none
}
