package collect

import (
	"strings"

	"meridian.internal/router/traces"
)

// sealing is a file that is not written any more.
type sealing struct {
	path     string
	compress bool
}

// fileClosed is called by Run's goroutine. A file that finds the sealer far behind is sealed at the next start.
func (c *Collector) fileClosed(path string) {
	s := sealing{path, c.o.Compress && strings.HasSuffix(path, ".jsonl") && !c.ending} // the end does not wait for compression
	select {
	case c.closed <- s:
	default:
		c.metrics.sealErrors.Inc()
	}
}

// seal indexes and compresses files beside Run, which must not wait for it: first those that dead processes left.
func (c *Collector) seal() {
	if err := traces.SealRest(c.o.Dir, c.o.Compress); err != nil {
		c.sealFailed(err)
	}
	for s := range c.closed {
		if err := traces.Seal(s.path, s.compress); err != nil {
			c.sealFailed(err)
		}
	}
}

// sealFailed is no loss: a file without an index is read from its beginning.
func (c *Collector) sealFailed(err error) {
	c.metrics.sealErrors.Inc()
	c.log.Warn("timelines cannot be indexed or compressed", "error", err)
}
