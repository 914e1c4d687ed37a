// Package load sends many requests and summarises how they went. The decisions (lengths, arrival times, percentiles,
// kinds of errors) are pure; Run is the I/O around them. It measures at the client and knows only the public API.
package load
