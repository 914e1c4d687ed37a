package pool

import "meridian.internal/shared/node"

// Apply takes one event of the registry.
func (p *Pool) Apply(ev node.Event) {
	switch ev.Kind {
	case node.Lost:
		p.Drop(ev.Info.Role, ev.Info.Name, "its lease ended without a word")
	case node.Left:
		p.Drop(ev.Info.Role, ev.Info.Name, "it left")
	default:
		p.Put(ev.Info)
	}
}
