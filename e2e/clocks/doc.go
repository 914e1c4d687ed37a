// Package clocks holds the clocks of whole clusters, real processes all, against the truth, and the times of requests that are
// told in them against what the client waited. It has tests only.
package clocks
