package main

import (
	"strings"
	"testing"
	"time"
)

// TestChatsRefuseWhatTheyWouldIgnore: a load of another kind than the one that was asked for would be measured.
func TestChatsRefuseWhatTheyWouldIgnore(t *testing.T) {
	for name, change := range map[string]func(*options){
		"rate": func(o *options) { o.Rate = 5 }, "duration": func(o *options) { o.Duration = time.Second }, "prefix": func(o *options) { o.Prefix = 8 },
		"no-stream": func(o *options) { o.Stream = false }, "no-ignore-eos": func(o *options) { o.IgnoreEOS = false }, "temperature": func(o *options) { o.Temperature = 1 },
	} {
		o := options{URL: "http://127.0.0.1:1", Model: "m", Requests: 1, Turns: 2, TurnWords: 1, Concurrency: 1, Stream: true, IgnoreEOS: true, Quiet: true}
		change(&o)
		if err := o.Run(t.Context(), nil); err == nil || !strings.Contains(err.Error(), "--"+name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
