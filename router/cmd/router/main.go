// Command router is the public face of a cluster: it places requests, runs both legs, relays tokens and keeps timelines.
package main

import (
	"os"

	"meridian.internal/shared/serve"
)

const about = `Meridian's router: OpenAI's API in front of context and generation nodes, and one timeline for each request.`

func main() {
	os.Exit(serve.Run("router", &options{}, serve.About(about), serve.WithHealthcheck("http://127.0.0.1:8000/healthz")))
}
