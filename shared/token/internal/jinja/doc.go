// Package jinja renders Jinja templates the way Python's jinja2 does for Hugging Face's chat templates: an immutable
// sandbox with trim_blocks and lstrip_blocks, the loop controls, and tojson, raise_exception and strftime_now.
//
// Parsing and walking are gonja's. Values, operators, attributes, filters and tests are ours, because gonja's differ
// from Python's where chat templates notice: None and undefined are one there, dictionaries lose their order, "x[-1]" of
// a list of one finds nothing, and expressions cannot span lines or hold a conditional in parentheses. So a template goes
// through three steps:
//
//	prepare   rewrites the source into what gonja's grammar accepts (prepare.go)
//	rewrite   replaces operators in the syntax tree by calls to our functions (rewrite.go)
//	Render    walks the tree; each of those calls also counts time, text and work (render.go)
//
// A template cannot read files, run for ever, fill the memory or panic the process.
package jinja
