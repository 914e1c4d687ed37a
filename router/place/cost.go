package place

// Fit is a line y = a + b·x through samples, old ones fading: the cost of prefill over tokens, or of a hand-over over
// bytes. The zero value knows nothing.
type Fit struct {
	n, sx, sy, sxx, sxy float64
}

const (
	fade      = 0.98 // weight of all former samples at each new one: about the last 50 count
	minFit    = 8    // samples below which no slope is fitted
	minSpread = 0.05 // variance of x over its squared mean, below which there is no slope to see
	held      = 4    // times the estimate, beyond which a sample says that something held the work up, not what it costs
)

// Add takes a sample.
func (f *Fit) Add(x, y float64) {
	f.n, f.sx, f.sy = f.n*fade+1, f.sx*fade+x, f.sy*fade+y
	f.sxx, f.sxy = f.sxx*fade+x*x, f.sxy*fade+x*y
}

// AddWork takes a sample of what is never far below its usual cost and now and then far over it, since the whole machine stands:
// one such sample would be believed for a long time. If it is the new cost, the next ones say so too.
func (f *Fit) AddWork(x, y float64) {
	if f.n >= 1 {
		y = min(y, held*f.At(x))
	}
	f.Add(x, y)
}

// Known tells whether there was a sample.
func (f *Fit) Known() bool { return f != nil && f.n > 0 }

// Line returns a and b, neither below 0. Where the samples do not show a slope, all of a small x is constant cost and
// what is over the mean x is in proportion: see At.
func (f *Fit) line() (a, b float64, ok bool) {
	mx, my := f.sx/f.n, f.sy/f.n
	vx := f.sxx/f.n - mx*mx
	if f.n < minFit || vx < minSpread*mx*mx || vx <= 0 {
		return 0, 0, false
	}
	b = max((f.sxy/f.n-mx*my)/vx, 0)
	a = my - b*mx
	if a < 0 {
		a, b = 0, my/mx
	}
	return a, b, true
}

// At estimates y at x; 0 when nothing is known.
func (f *Fit) At(x float64) float64 {
	if !f.Known() {
		return 0
	}
	if a, b, ok := f.line(); ok {
		return a + b*x
	}
	y := f.sy / f.n
	if mx := f.sx / f.n; mx > 0 && x > mx {
		y *= x / mx
	}
	return y
}

// Slope is what one more unit of x costs; 0 when nothing is known.
func (f *Fit) Slope() float64 {
	if !f.Known() || f.sx <= 0 {
		return 0
	}
	if _, b, ok := f.line(); ok && b > 0 {
		return b
	}
	return f.sy / f.sx
}

// Constant is the part of the cost that does not depend on x, as far as the samples show it.
func (f *Fit) Constant() float64 { return f.At(0) }

// Costs are what the two ways of serving a request are estimated to take until its first decode step.
type Costs struct {
	LocalNS  float64 // prefill on the generation node
	RemoteNS float64 // prefill on the context node, and what of the hand-over prefill does not hide
	TokenNS  float64 // one more token on the context node
	remote   int     // tokens that the context node would compute
}

// Local tells whether the generation node is to do it when so many tokens are left to compute there. What the context node would
// compute beyond these counts once more: its time is taken from other prompts.
func (c Costs) Local(left int) bool {
	return c.LocalNS < c.RemoteNS+c.TokenNS*float64(max(c.remote-left, 0))
}

// Borrow is LocalNS where the generation node first fetches KV from a peer, after which so many tokens are left to compute.
func Borrow(gen *Node, genPrefill, ctxPrefill *Fit, left int, fetchNS float64) float64 {
	if !genPrefill.Known() {
		genPrefill = ctxPrefill
	}
	return genPrefill.At(float64(gen.QueuedTokens+left)) + fetchNS
}

// Way is what is known of a pair of nodes.
type Way struct {
	Ctx, Gen               *Node
	CtxPrefill, GenPrefill *Fit // ns over tokens
	Handover               *Fit // ns over bytes; nil: never measured
	BytesPerToken          float64
}

// Estimate compares the two ways of serving a request. A generation node whose prefill was never measured is taken to be as fast
// as the context node. False: too little was measured.
func (w *Way) Estimate(q *Query) (Costs, bool) {
	if !w.CtxPrefill.Known() || !w.Handover.Known() {
		return Costs{}, false
	}
	genPrefill := w.GenPrefill
	if !genPrefill.Known() {
		genPrefill = w.CtxPrefill
	}
	local, remote := q.Tokens-q.Matched(w.Gen), q.Tokens-q.Matched(w.Ctx)
	return Costs{
		LocalNS:  genPrefill.At(float64(w.Gen.QueuedTokens + local)),
		RemoteNS: w.CtxPrefill.At(float64(w.Ctx.QueuedTokens+remote)) + w.Handover.At(w.BytesPerToken*float64(local)),
		TokenNS:  w.CtxPrefill.Slope(), remote: remote,
	}, true
}
