package backend

import "slices"

// Window is a group of layers whose queries see only the last tokens. Their KV has blocks of its own, numbered from 0, and
// block tables of its own (Entry.Windows), so that what is out of sight is given back while the sequence runs.
type Window struct {
	Tokens int   // that a query sees, itself included
	Layers []int // of the model, rising
	Blocks int   // of Info.TokensPerBlock tokens
}

// WindowsOf groups layers by their windows: tokens[i] is that of layer i, and one of 0 or of the context sees everything.
// Layers that see everything are in no group. Each group gets so many blocks; wider windows come first.
func WindowsOf(tokens []int, st Stage, context, blocks int) []Window {
	var groups []Window
	for layer := st.First; layer < min(st.End, len(tokens)); layer++ {
		n := tokens[layer]
		if n == 0 || n >= context {
			continue
		}
		i := slices.IndexFunc(groups, func(w Window) bool { return w.Tokens == n })
		if i < 0 {
			i = len(groups)
			groups = append(groups, Window{Tokens: n, Blocks: blocks})
		}
		groups[i].Layers = append(groups[i].Layers, layer)
	}
	slices.SortFunc(groups, func(a, b Window) int { return b.Tokens - a.Tokens })
	return groups
}

// Group is 0 for a layer that sees everything, else i+1 for one of Windows[i].
func (i *Info) Group(layer int) int {
	for w := range i.Windows {
		if slices.Contains(i.Windows[w].Layers, layer) {
			return w + 1
		}
	}
	return 0
}

// Run is the group of a layer, and the end of the layers of that group that follow it without a gap, below to.
func (i *Info) Run(layer, to int) (group, end int) {
	if len(i.Windows) == 0 {
		return 0, to
	}
	group = i.Group(layer)
	for end = layer + 1; end < to && i.Group(end) == group; end++ {
	}
	return group, end
}

// GroupLayers is the number of layers of a group that the stage owns.
func (i *Info) GroupLayers(group int) int {
	if group > 0 {
		return len(i.Windows[group-1].Layers)
	}
	n := i.Stage.End - i.Stage.First
	for w := range i.Windows {
		n -= len(i.Windows[w].Layers)
	}
	return n
}

// GroupBlocks is the number of blocks of a group.
func (i *Info) GroupBlocks(group int) int {
	if group > 0 {
		return i.Windows[group-1].Blocks
	}
	return i.KVBlocks
}

// Place is where a layer's KV is: in which group of layers, and as which of its layers.
type Place struct{ Group, Layer int }

// Places gives the place of each layer of the stage.
func (i *Info) Places() (places []Place) {
	seen := make([]int, 1+len(i.Windows)) // layers of each group
	for layer := i.Stage.First; layer < i.Stage.End; layer++ {
		g := i.Group(layer)
		places = append(places, Place{g, seen[g]})
		seen[g]++
	}
	return places
}

// BlockBytes is the size in bytes of one block of a group in the canonical layout.
func (i *Info) BlockBytes(group int) int {
	return i.KVBytes(0, i.GroupLayers(group)) * i.TokensPerBlock
}
