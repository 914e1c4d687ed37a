// Command clocksync is the clock-sync daemon and its plot.
package main

import (
	"os"

	"meridian.internal/shared/serve"
)

const about = `Meridian's clock-sync daemon: measures every node's clock against every router's, with proven bounds.

The subcommand 'plot --node NAME' draws a clock from the log.`

const aboutPlot = `Draw a clock from the log in NATS: offset residual, bound and round trip over time.`

func main() {
	// Not a kong command, so that --help of the daemon shows its options at once.
	if len(os.Args) > 1 && os.Args[1] == "plot" {
		os.Args = append(os.Args[:1:1], os.Args[2:]...)
		os.Exit(serve.Run("clocksync plot", &plotCmd{}, serve.About(aboutPlot)))
	}
	os.Exit(serve.Run("clocksync", &serveCmd{}, serve.About(about), serve.WithHealthcheck("http://127.0.0.1:9400/healthz")))
}
