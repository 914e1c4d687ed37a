// Command clocksync is the clock-sync daemon and its plot.
package main

import (
	"os"

	"meridian.internal/shared/serve"
)

const about = `Meridian's clock-sync daemon: measures every node's clock against every router's, with proven bounds.`

func main() {
	os.Exit(serve.Run("clocksync", &serveCmd{}, serve.About(about), serve.WithHealthcheck("http://127.0.0.1:9400/healthz")))
}
