// Package serve owns what every program of the project shares around its own work: the command line (flags, MERIDIAN_*
// environment, YAML file), signals and exit codes, the healthcheck subcommand, the HTTP server that lives and drains
// under a context, with its admin routes, and a bound on what others can make it log. It knows nothing of requests, nodes or NATS.
package serve
