// Package remote owns the engine of a rank that is another process of this host, as its node sees it: Start begins the process,
// an Engine takes requests for it, and Serve in the process gives them to its own engine. It decides nothing: where requests go,
// and what rows mean, is gpu/ranks's.
//
// A process has three connections, socket pairs that it inherits: rounds (gpu/collective), orders and their answers, and KV
// bytes, which must not hold the others up. What an engine has to say goes through one queue, in order, and as much at a time as
// has gathered: tokens of a step cost one message. The end of a connection is the end of the process for the node, and the end of
// the node for the process.
package remote
