package token

import "strings"

// Stopper looks for stop strings in a text that arrives in parts. It holds back only what could still become a stop
// string. The result does not depend on how the text is cut: the stop string that is complete first counts, and of
// those complete at the same place the longest.
type Stopper struct {
	stops   []stopString
	held    string // the end of the text so far, not yet emitted
	stopped bool
	which   string
}

// stopString is one pattern with its Knuth-Morris-Pratt table.
type stopString struct {
	text    string
	fail    []int // fail[i] is the length of the longest proper prefix of text that ends text[:i]
	matched int   // the length of the longest prefix of text that ends the text so far
}

// NewStopper returns a Stopper for the strings; empty ones are ignored. With none, Push passes all text through.
func NewStopper(stops []string) *Stopper {
	s := &Stopper{}
	for _, text := range stops {
		if text != "" {
			s.stops = append(s.stops, stopString{text: text, fail: failTable(text)})
		}
	}
	return s
}

func failTable(text string) []int {
	fail := make([]int, len(text)+1)
	for i, k := 1, 0; i < len(text); i++ {
		for k > 0 && text[i] != text[k] {
			k = fail[k]
		}
		if text[i] == text[k] {
			k++
		}
		fail[i+1] = k
	}
	return fail
}

// step takes the next byte and reports whether it completes the stop string.
func (p *stopString) step(b byte) bool {
	if p.matched == len(p.text) {
		p.matched = p.fail[p.matched]
	}
	for p.matched > 0 && p.text[p.matched] != b {
		p.matched = p.fail[p.matched]
	}
	if p.text[p.matched] == b {
		p.matched++
	}
	return p.matched == len(p.text)
}

// Push takes the next part of the text and returns what can be shown of it. When a stop string is complete, stopped is
// true, which names it, and neither it nor anything after it is ever emitted.
func (s *Stopper) Push(text string) (emit string, stopped bool, which string) {
	if s.stopped {
		return "", true, s.which
	}
	if len(s.stops) == 0 {
		return text, false, ""
	}
	all := s.held + text
	for i := range len(text) {
		if longest := s.step(text[i]); longest != "" {
			s.stopped, s.which, s.held = true, longest, ""
			end := len(all) - len(text) + i + 1
			return all[:end-len(longest)], true, longest
		}
	}
	hold := 0
	for i := range s.stops {
		hold = max(hold, s.stops[i].matched)
	}
	s.held = strings.Clone(all[len(all)-hold:])
	return all[:len(all)-hold], false, ""
}

// step returns the longest stop string that the byte completes, or "".
func (s *Stopper) step(b byte) string {
	longest := ""
	for i := range s.stops {
		if s.stops[i].step(b) && len(s.stops[i].text) > len(longest) {
			longest = s.stops[i].text
		}
	}
	return longest
}

// Flush returns what was held back, when the text is over without a stop string.
func (s *Stopper) Flush() string {
	text := s.held
	s.held = ""
	return text
}
