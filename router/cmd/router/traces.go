package main

// traceFlags are the options of timelines beside where they are and how much of them is kept.
type traceFlags struct {
	TracesCompress bool `help:"Compress files of timelines that are complete (zstd); everything that reads them reads both." name:"traces-compress"`
}
