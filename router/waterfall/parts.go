package waterfall

import (
	"fmt"
	"slices"
	"strings"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/phase"
)

// afterFirstToken draws the whole request as one bar, and the pace of its tokens.
func (d *drawing) afterFirstToken() {
	l := d.l
	if l.TTFTNS == nil || l.E2ENS == nil || *l.E2ENS <= 0 {
		return
	}
	bars := d.width - 30
	c := newCanvas(bars)
	scale := float64(bars) / float64(*l.E2ENS)
	for _, s := range l.Spans {
		from, to := float64(s.StartNS)*scale, float64(s.StartNS+s.DurNS)*scale
		if to-from >= 0.125 {
			c.bar(from, to, kind(s))
		}
	}
	d.printf("\n%s  %s %s\n", pad("whole request", 18), d.line(c), padLeft(Duration(*l.E2ENS), 8))
	d.pace(bars)
}

// pace draws the time from token to token as the node measured it.
func (d *drawing) pace(bars int) {
	for i := range d.l.Phases {
		p := &d.l.Phases[i]
		at := p.Steps.Column("token_ns")
		if len(at) < 2 {
			continue
		}
		gaps := make([]int64, len(at)-1)
		for i := range gaps {
			gaps[i] = at[i+1] - at[i]
		}
		sorted := slices.Clone(gaps)
		slices.Sort(sorted)
		q := func(f float64) string { return Duration(sorted[min(len(sorted)-1, int(f*float64(len(sorted))))]) }
		spark := Spark(gaps, bars)
		if len(gaps) < bars { // each token as wide as its share
			wide := make([]int64, bars)
			for x := range wide {
				wide[x] = gaps[x*len(gaps)/bars]
			}
			spark = Spark(wide, bars)
		}
		d.printf("%s  %s\n", pad("token to token", 18), d.paint(spark, teal))
		batch := p.Steps.Column("batch_size")
		text := fmt.Sprintf("%s steps on %s: p50 %s, p99 %s, longest %s", Count(int64(len(at))), Clean(p.Node, 20), q(0.5), q(0.99), q(1))
		if len(batch) > 0 {
			text += fmt.Sprintf("; in batches of %d to %d", slices.Min(batch), slices.Max(batch))
		}
		d.printf("%s  %s\n", strings.Repeat(" ", 18), d.paint(text, grey))
		if text := shapeOf(p); text != "" {
			d.printf("%s  %s\n", strings.Repeat(" ", 18), d.paint(text, grey))
		}
	}
	if x := d.l.Decode; x != nil {
		text := fmt.Sprintf("compute %s, sampling %s, waiting for the batch %s", Duration(x.ComputeNS), Duration(x.SampleNS), Duration(x.WaitNS))
		if x.PreemptedNS > 0 {
			text += fmt.Sprintf(", of it preempted %s", Duration(x.PreemptedNS))
		}
		d.printf("%s  %s\n", strings.Repeat(" ", 18), d.paint(text, grey))
	}
}

// shapeOf says on which rank of its node a phase ran, and what the stages of a pipeline took of a step; "" where there is one.
func shapeOf(p *timeline.Phase) string {
	var parts []string
	if p.DPRank != nil {
		parts = append(parts, fmt.Sprintf("rank %d", *p.DPRank))
	}
	stages := p.Steps.Stages()
	if len(stages) > 1 {
		parts = append(parts, fmt.Sprintf("%d stages, p50", len(stages)))
	}
	for i, s := range stages {
		if len(stages) == 1 || len(s.EndNS) != len(s.StartNS) || len(s.StartNS) == 0 {
			continue
		}
		took := make([]int64, len(s.StartNS))
		for k := range took {
			took[k] = s.EndNS[k] - s.StartNS[k]
		}
		slices.Sort(took)
		if half := Duration(took[len(took)/2]); i == 0 {
			parts[len(parts)-1] += " " + half
		} else {
			parts = append(parts, half)
		}
	}
	return strings.Join(parts, ", ")
}

// handover says what the KV transfer cost and how much of it nobody waited for.
func (d *drawing) handover() {
	h := d.l.Handover
	if h == nil {
		return
	}
	text := fmt.Sprintf("%s in %s frames, %s tokens", Bytes(h.Bytes), Count(h.Frames), Count(int64(h.Tokens)))
	if h.TokensHeld > 0 {
		text += fmt.Sprintf(" (%s were there already)", Count(int64(h.TokensHeld)))
	}
	if h.DurNS != nil {
		text += ", " + Duration(*h.DurNS)
		if h.HiddenNS != nil && *h.DurNS > 0 {
			text += fmt.Sprintf(", %.0f %% of it behind prefill", 100*float64(*h.HiddenNS)/float64(*h.DurNS))
		}
	}
	d.printf("\n%s  %s\n", d.paint(pad("KV hand-over", 18), magenta), text)
	var parts []string
	for _, p := range []struct {
		name string
		ns   *int64
	}{{"open", h.OpenNS}, {"allocate", h.AllocateNS}, {"notify", h.NotifyNS}, {"wire", &h.WireNS}, {"install", &h.InstallNS}} {
		if p.ns != nil {
			parts = append(parts, p.name+" "+Duration(*p.ns))
		}
	}
	d.printf("%s  %s\n", strings.Repeat(" ", 18), d.paint(strings.Join(parts, ", "), grey))
}

// trouble tells what failed, what is missing and what does not add up.
func (d *drawing) trouble() {
	l := d.l
	say := func(name string, c colour, text string) {
		d.printf("%s  %s\n", d.paint(pad(name, 18), c), Clean(text, 400))
	}
	if l.Error != nil {
		say("error", red, fmt.Sprintf("%s: %s (%s)", l.Error.Stage, l.Error.Message, l.Error.Type))
	}
	for _, a := range l.Attempts {
		if a.Outcome == phase.Finished {
			continue
		}
		text := fmt.Sprintf("%s %s, try %d: %s", a.Role, a.Node, a.Attempt+1, a.Outcome)
		if a.Error != nil && (l.Error == nil || a.Error.Message != l.Error.Message) {
			text += ": " + a.Error.Message
		}
		say("attempt", red, text)
	}
	for _, m := range l.Missing {
		say("missing", red, m)
	}
	if l.NegativeSpans > 0 {
		say("negative spans", red, fmt.Sprint(l.NegativeSpans))
	}
	for _, v := range l.Violations {
		say("causality", red, fmt.Sprintf("%s at %s lies %s before its cause %s at %s, %s more than the clocks' bound of ±%s allows", v.Event, Duration(v.EventNS),
			Duration(v.CauseNS-v.EventNS), v.Cause, Duration(v.CauseNS), Duration(v.ExcessNS), Duration(v.BoundNS)))
	}
	if x := l.Decision; x != nil && x.Reason != "" {
		say("placement", grey, x.Policy+": "+x.Reason)
	}
}

// clocks says how each node's stamps got onto one clock, and those of its ranks that have clocks of their own onto the node's.
func (d *drawing) clocks() {
	var seen []string
	say := func(node, name, text string) {
		if key := node + " " + name; !slices.Contains(seen, key) {
			seen = append(seen, key)
			d.printf("%s  %s\n", d.paint(pad(name, 18), grey), d.paint(text, grey))
		}
	}
	for i := range d.l.Phases {
		p := &d.l.Phases[i]
		if p.Role == phase.Disagg {
			continue
		}
		say(p.Node, "clock "+Clean(p.Node, 11), clockText(p.Clock))
		if p.Rank != nil && p.DPRank != nil {
			say(p.Node, fmt.Sprintf("  of its rank %d", *p.DPRank), rankClockText(*p.Rank))
		}
	}
	d.printf("\n")
}

func rankClockText(c timeline.RankClock) string {
	switch c.State {
	case "none":
		return "not aligned: no estimate was valid; the stamps of its engine are left out"
	case "identity":
		return "the node's own clock, read within ±" + Duration(c.BoundNS)
	}
	return fmt.Sprintf("offset to the node's %s ±%s, %s", Duration(c.OffsetNS), Duration(c.BoundNS), Clean(c.State, 20))
}

func clockText(c timeline.PhaseClock) string {
	switch {
	case c.OffsetNS == nil || c.BoundNS == nil:
		return "not aligned: no estimate was valid; its stamps stay on its own clock"
	case c.State == "identity":
		return "the router's own clock, read within ±" + Duration(*c.BoundNS)
	}
	text := fmt.Sprintf("offset %s ±%s", Duration(*c.OffsetNS), Duration(*c.BoundNS))
	if c.SkewPPB != 0 {
		text += fmt.Sprintf(", runs %+.3f ppm", -float64(c.SkewPPB)/1000)
	}
	text += ", " + Clean(c.State, 20)
	if c.Via != "" {
		text += " via " + Clean(c.Via, 20)
	}
	return text
}
