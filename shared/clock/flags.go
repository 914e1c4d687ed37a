package clock

import "time"

// Flags are the options of a process's clock, to be embedded into its command line (`embed:""`). All of them make the clock
// wrong on purpose: they are there so that operators can see that a wrong clock is found.
type Flags struct {
	FaultClockSkewPPM   float64       `help:"Test mode: the node's clock runs fast by this many ppm." name:"fault-clock-skew-ppm" placeholder:"PPM"`
	FaultClockStep      time.Duration `help:"Test mode: the node's clock jumps by this much, once, without a word." name:"fault-clock-step" placeholder:"DURATION"`
	FaultClockStepAfter time.Duration `help:"Test mode: time from the start to the jump." name:"fault-clock-step-after" default:"30s"`
	FaultClockLie       time.Duration `help:"Test mode: clock probes are answered with stamps that are wrong by this much; records are not." name:"fault-clock-lie" placeholder:"DURATION"`
}

// Options are what New takes.
func (f Flags) Options() Options {
	return Options{FaultSkewPPM: f.FaultClockSkewPPM, FaultStep: f.FaultClockStep, FaultStepAfter: f.FaultClockStepAfter, FaultLie: f.FaultClockLie}
}
