package token

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// stage is one pre-tokenizer: it cuts a piece into smaller ones. first says that the piece begins the whole text.
type stage func(piece string, first bool, next func(piece string, first bool))

// runStages sends a piece through the stages in order. Empty pieces end there.
func runStages(stages []stage, piece string, first bool, emit func(string)) {
	if piece == "" {
		return
	}
	if len(stages) == 0 {
		emit(piece)
		return
	}
	stages[0](piece, first, func(p string, f bool) { runStages(stages[1:], p, f, emit) })
}

// preTokenizerJSON holds the fields of all kinds of pre-tokenizer.
type preTokenizerJSON struct {
	Type           string            `json:"type"`
	PreTokenizers  []json.RawMessage `json:"pretokenizers"`
	Pattern        patternJSON       `json:"pattern"`
	Behavior       string            `json:"behavior"`
	Invert         bool              `json:"invert"`
	AddPrefixSpace *bool             `json:"add_prefix_space"`
	UseRegex       *bool             `json:"use_regex"`
	Individual     bool              `json:"individual_digits"`
	Replacement    string            `json:"replacement"`
	PrependScheme  string            `json:"prepend_scheme"`
	Split          *bool             `json:"split"`
}

type patternJSON struct {
	Regex  *string `json:"Regex"`
	String *string `json:"String"`
}

// maxNesting bounds Sequences inside Sequences.
const maxNesting = 8

// preTokenizer is the compiled "pre_tokenizer".
type preTokenizer struct {
	stages    []stage
	byteLevel bool // the pieces are spelled in the byte-level alphabet from here on
}

// add compiles one pre-tokenizer after those before it.
func (p *preTokenizer) add(raw json.RawMessage, field string, depth int) error {
	if isNull(raw) {
		return nil
	}
	if depth > maxNesting {
		return fmt.Errorf("%s: nested more than %d deep", field, maxNesting)
	}
	var j preTokenizerJSON
	if err := json.Unmarshal(raw, &j); err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	if j.Type == "Sequence" {
		for i, sub := range j.PreTokenizers {
			if err := p.add(sub, fmt.Sprintf("%s.pretokenizers[%d]", field, i), depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	if p.byteLevel {
		// It would see the byte-level alphabet, not the text.
		return unsupported(field+".type after ByteLevel", j.Type, "nothing after ByteLevel")
	}
	return p.addOne(j, field)
}

func (p *preTokenizer) addOne(j preTokenizerJSON, field string) error {
	var s stage
	var err error
	switch j.Type {
	case "Split":
		s, err = splitStage(j, field)
	case "ByteLevel":
		p.byteLevel = true
		return p.addByteLevel(j)
	case "Digits":
		limit := -1
		if j.Individual {
			limit = 1
		}
		s = isolate([]scanner{many(unicode.IsNumber, limit)}, true, true)
	case "Metaspace":
		s, err = metaspaceStage(j, field)
	default:
		err = unsupported(field+".type", j.Type, "Sequence, Split, ByteLevel, Digits or Metaspace")
	}
	if err == nil {
		p.stages = append(p.stages, s)
	}
	return err
}

func (p *preTokenizer) addByteLevel(j preTokenizerJSON) error {
	if j.AddPrefixSpace == nil || *j.AddPrefixSpace {
		p.stages = append(p.stages, func(piece string, first bool, next func(string, bool)) {
			if piece[0] != ' ' {
				piece = " " + piece
			}
			next(piece, first)
		})
	}
	if j.UseRegex == nil || *j.UseRegex {
		scanners, err := compilePattern(gpt2Pattern)
		if err != nil {
			return err
		}
		p.stages = append(p.stages, isolate(scanners, true, true))
	}
	return nil
}

func splitStage(j preTokenizerJSON, field string) (stage, error) {
	var scanners []scanner
	switch {
	case j.Pattern.Regex != nil:
		var err error
		if scanners, err = compilePattern(*j.Pattern.Regex); err != nil {
			return nil, fmt.Errorf("%s.pattern: %w", field, err)
		}
	case j.Pattern.String != nil && *j.Pattern.String != "":
		literal := *j.Pattern.String
		scanners = []scanner{func(s string) int {
			if strings.HasPrefix(s, literal) {
				return len(literal)
			}
			return 0
		}}
	default:
		return nil, fmt.Errorf("%s.pattern has neither Regex nor a String with text", field)
	}
	switch j.Behavior {
	case "Isolated":
		return isolate(scanners, true, true), nil
	case "Removed":
		// Inverted, the matches are what stays.
		return isolate(scanners, j.Invert, !j.Invert), nil
	}
	return nil, unsupported(field+".behavior", j.Behavior, "Isolated or Removed")
}

// isolate cuts a piece into the matches and the stretches between them, and passes on those that are wanted.
func isolate(scanners []scanner, matches, gaps bool) stage {
	return func(piece string, first bool, next func(string, bool)) {
		gap := 0
		for i := 0; i < len(piece); {
			n := scan(scanners, piece[i:])
			if n == 0 {
				_, size := utf8.DecodeRuneInString(piece[i:])
				i += size
				continue
			}
			if gaps && gap < i {
				next(piece[gap:i], first && gap == 0)
			}
			if matches {
				next(piece[i:i+n], first && i == 0)
			}
			i += n
			gap = i
		}
		if gaps && gap < len(piece) {
			next(piece[gap:], first && gap == 0)
		}
	}
}

// metaspaceStage writes spaces as a visible character, and may put one before the text.
func metaspaceStage(j preTokenizerJSON, field string) (stage, error) {
	marker := j.Replacement
	if utf8.RuneCountInString(marker) != 1 {
		return nil, unsupported(field+".replacement", marker, "one character")
	}
	scheme := prependScheme(j.PrependScheme, j.AddPrefixSpace)
	if scheme != "always" && scheme != "first" && scheme != "never" {
		return nil, unsupported(field+".prepend_scheme", scheme, "always, first or never")
	}
	split := j.Split == nil || *j.Split
	return func(piece string, first bool, next func(string, bool)) {
		piece = strings.ReplaceAll(piece, " ", marker)
		if (scheme == "always" || scheme == "first" && first) && !strings.HasPrefix(piece, marker) {
			piece = marker + piece
		}
		for split {
			i := strings.Index(piece[1:], marker) // a marker begins a piece, so not the one at 0
			if i < 0 {
				break
			}
			next(piece[:1+i], first)
			piece, first = piece[1+i:], false
		}
		next(piece, first)
	}, nil
}

// prependScheme reads the newer field, or the older one that it replaced.
func prependScheme(scheme string, addPrefixSpace *bool) string {
	switch {
	case scheme != "":
		return scheme
	case addPrefixSpace != nil && !*addPrefixSpace:
		return "never"
	}
	return "always"
}
