// Package ranks holds only tests: nodes of several ranks and pipeline stages give the texts of one device, hand KV to each other, and
// keep books that agree. They run the real binaries and skip where these are not built.
package ranks
