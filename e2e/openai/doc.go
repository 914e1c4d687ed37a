// Package openai holds tests that drive a whole cluster with OpenAI's own Go client, and hold its texts to the golden
// ones. It holds nothing else. The tests need the binaries of "make build" and are skipped without them.
package openai
