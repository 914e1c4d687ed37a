// Package worker is the HTTP face that both kinds of node share: the OpenAI routes with disaggregated_params, answered as
// a stream or as a whole, the tokenizer and the server's description for routers, the pushed clock offset, and one phase
// record for every attempt. It owns parsing, tokenizing, the text of answers (stop strings, held-back UTF-8, logprobs) and
// the mapping of errors to statuses. It does not know the engine nor how KV travels: a Runner starts a Leg.
//
// One goroutine serves one leg. The legs of one request share its writer under a mutex.
package worker
