// Package deploy has tests only: the dashboard and the alerts under deploy/ speak of metrics that the processes really have.
package deploy
