package admit

// drainSlots are whole seconds that the rate is averaged over.
const drainSlots = 10

// drain measures how much weight ends a second, over the last drainSlots seconds and the one that runs.
type drain struct {
	slots   [drainSlots + 1]int
	atS     int64 // second of the newest slot
	beganNS int64 // first end that was seen; 0: none
}

func (d *drain) turn(nowNS int64) {
	now := nowNS / 1e9
	if now-d.atS > drainSlots {
		clear(d.slots[:])
		d.atS = now
	}
	for d.atS < now {
		d.atS++
		d.slots[d.atS%int64(len(d.slots))] = 0
	}
}

func (d *drain) add(nowNS int64, weight int) {
	if d.beganNS == 0 {
		d.beganNS = max(nowNS, 1)
	}
	d.turn(nowNS)
	d.slots[d.atS%int64(len(d.slots))] += weight
}

// perSecond is 0 when nothing ended in the time that it looks at.
func (d *drain) perSecond(nowNS int64) float64 {
	if d.beganNS == 0 {
		return 0
	}
	d.turn(nowNS)
	sum := 0
	for _, n := range d.slots {
		sum += n
	}
	from := max((d.atS-drainSlots)*1e9, d.beganNS)
	seconds := max(float64(nowNS-from)/1e9, 1)
	return float64(sum) / seconds
}
