// Package clocks holds the clocks of whole clusters, real processes all, against the truth. It has tests only.
package clocks
