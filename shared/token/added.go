package token

import (
	"cmp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// addedToken is one entry of "added_tokens": text that is cut out before the model sees it.
type addedToken struct {
	ID         int32  `json:"id"`
	Content    string `json:"content"`
	SingleWord bool   `json:"single_word"` // only where no word character touches it
	LStrip     bool   `json:"lstrip"`      // swallows the white space before it
	RStrip     bool   `json:"rstrip"`      // and after it
	Normalized bool   `json:"normalized"`  // looked for in the normalized text
	Special    bool   `json:"special"`
}

// addedSet finds added tokens in a text: leftmost first, the longest of those that begin at one place.
type addedSet struct {
	starts [256]bool // first bytes of any token
	byText map[string]addedToken
	// lengths are those of the tokens that begin with a byte, longest first: one look-up for each.
	lengths [256][]int
}

// newAddedSet builds the set; spell gives the text to look for.
func newAddedSet(tokens []addedToken, spell func(string) string) addedSet {
	set := addedSet{byText: map[string]addedToken{}}
	for _, tok := range tokens {
		text := spell(tok.Content)
		if text == "" {
			continue // Hugging Face's library ignores it as well
		}
		b := text[0]
		set.starts[b] = true
		set.byText[text] = tok
		if !slices.Contains(set.lengths[b], len(text)) {
			set.lengths[b] = append(set.lengths[b], len(text))
		}
	}
	for b := range set.lengths {
		slices.SortFunc(set.lengths[b], func(x, y int) int { return cmp.Compare(y, x) })
	}
	return set
}

// split calls emit for each part of text in order, with its place: a stretch without added tokens (id -1) or one token.
func (set *addedSet) split(text string, emit func(part string, at int, id int32)) {
	done := 0
	for i := 0; i < len(text); {
		if !set.starts[text[i]] {
			i++
			continue
		}
		tok, n := set.match(text[i:])
		if n == 0 {
			i++
			continue
		}
		start, stop := i, i+n
		if tok.SingleWord && (endsWithWord(text[:start]) || startsWithWord(text[stop:])) {
			i = stop
			continue
		}
		if tok.LStrip {
			start = done + len(strings.TrimRightFunc(text[done:start], unicode.IsSpace))
		}
		if tok.RStrip {
			stop = len(text) - len(strings.TrimLeftFunc(text[stop:], unicode.IsSpace))
		}
		if start > done {
			emit(text[done:start], done, -1)
		}
		emit(text[start:stop], start, tok.ID)
		done, i = stop, stop
	}
	if done < len(text) {
		emit(text[done:], done, -1)
	}
}

// match returns the longest token that s begins with, and its length.
func (set *addedSet) match(s string) (addedToken, int) {
	for _, n := range set.lengths[s[0]] {
		if n > len(s) {
			continue
		}
		if tok, ok := set.byText[s[:n]]; ok {
			return tok, n
		}
	}
	return addedToken{}, 0
}

func startsWithWord(s string) bool {
	r, _ := utf8.DecodeRuneInString(s)
	return s != "" && isWord(r)
}

func endsWithWord(s string) bool {
	r, _ := utf8.DecodeLastRuneInString(s)
	return s != "" && isWord(r)
}

// isWord is \w of the regular expressions that Hugging Face's library uses.
func isWord(r rune) bool {
	return unicode.IsLetter(r) || unicode.IsMark(r) || unicode.Is(unicode.Nd, r) || unicode.Is(unicode.Nl, r) ||
		unicode.Is(unicode.Pc, r) || unicode.Is(unicode.Other_Alphabetic, r) || unicode.Is(unicode.Join_Control, r)
}
