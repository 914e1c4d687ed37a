// Package openai holds the tests that a client library which others wrote understands the router: OpenAI's own for Go. It
// owns no code but tests.
package openai
