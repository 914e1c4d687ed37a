// Package clock owns time inside one process and what processes tell each other of it: the steady clock and its id, the
// offset that somebody pushed to a node, and the estimate of one clock against another as it travels in records, KV
// buckets and JSON faces. It measures nothing over a network (clocksync does) and converts no records (router/timeline
// does).
//
// One sign everywhere: offset = reference - local; add it to a local stamp. All stamps are int64 nanoseconds.
package clock
