// Package keys owns the API keys of the router's clients: the file that lists them, who a request comes from, and what
// each key may use. It knows secrets only by their SHA-256; it reads no request and writes no answer.
//
// One Principal stands for one key id. It outlives a reload of the file, so that running requests and used up limits are
// not forgotten; a key that was removed is refused from the reload on, and its running requests end as they would.
package keys
