// Command timeline shows, sums up and checks the timelines that a router wrote.
package main

import (
	"os"

	"meridian.internal/shared/serve"
)

const about = `Shows where the time of requests went, from the files that the router writes to --traces.`

func main() {
	os.Exit(serve.Run("timeline", &commands{}, serve.About(about)))
}
