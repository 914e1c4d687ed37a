// Command ctxnode is a context node: it computes the KV of prompts and hands it to generation nodes.
package main

import (
	"os"

	"meridian.internal/ctxnode/prefill"
)

func main() { os.Exit(prefill.Main()) }
