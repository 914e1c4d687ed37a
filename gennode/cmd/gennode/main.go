// Command gennode is a generation node: it takes over the KV of prompts from context nodes and generates tokens.
package main

import (
	"os"

	"meridian.internal/gennode/decode"
)

func main() { os.Exit(decode.Main()) }
