package token

import (
	"encoding/json"
	"fmt"
	"strings"
	"unicode"

	"golang.org/x/text/unicode/norm"
)

// normalizerJSON holds the fields of all kinds of normalizer.
type normalizerJSON struct {
	Type        string            `json:"type"`
	Normalizers []json.RawMessage `json:"normalizers"`
	Prepend     string            `json:"prepend"`
	Pattern     patternJSON       `json:"pattern"`
	Content     string            `json:"content"`
	StripLeft   bool              `json:"strip_left"`
	StripRight  bool              `json:"strip_right"`
}

// growth bounds by how much replacements make a text longer, all together. The zero value has none.
type growth float64

// maxGrowth is far more than a model's file asks for, such as three bytes for a space.
const maxGrowth = 1024

// by takes one replacement in.
func (g *growth) by(pattern, content, field string) error {
	if *g = max(*g, 1); len(content) > len(pattern) {
		*g *= growth(len(content)) / growth(len(pattern))
	}
	if *g > maxGrowth {
		return fmt.Errorf("%s: with the replacements before it a text may grow by more than %d times", field, maxGrowth)
	}
	return nil
}

// newNormalizer compiles "normalizer"; nil means none. The Unicode forms are those of x/text, which breaks up a run of
// more than 30 combining marks with a joiner (UAX 15, stream-safe text).
func newNormalizer(raw json.RawMessage, field string, depth int, grown *growth) (func(string) string, error) {
	if isNull(raw) {
		return nil, nil
	}
	if depth > maxNesting {
		return nil, fmt.Errorf("%s: nested more than %d deep", field, maxNesting)
	}
	var j normalizerJSON
	if err := json.Unmarshal(raw, &j); err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	switch j.Type {
	case "Sequence":
		return sequence(j.Normalizers, field, depth, grown)
	case "NFC":
		return norm.NFC.String, nil
	case "NFD":
		return norm.NFD.String, nil
	case "NFKC":
		return norm.NFKC.String, nil
	case "NFKD":
		return norm.NFKD.String, nil
	case "Prepend":
		return func(s string) string {
			if s == "" {
				return s
			}
			return j.Prepend + s
		}, nil
	case "Replace":
		if j.Pattern.String == nil || *j.Pattern.String == "" {
			return nil, fmt.Errorf("%s.pattern is not a String with text; a Regex is not supported here", field)
		}
		if err := grown.by(*j.Pattern.String, j.Content, field); err != nil {
			return nil, err
		}
		return func(s string) string { return strings.ReplaceAll(s, *j.Pattern.String, j.Content) }, nil
	case "Strip":
		return stripper(j.StripLeft, j.StripRight), nil
	}
	return nil, unsupported(field+".type", j.Type, "Sequence, NFC, NFD, NFKC, NFKD, Prepend, Replace or Strip")
}

func sequence(raws []json.RawMessage, field string, depth int, grown *growth) (func(string) string, error) {
	var all []func(string) string
	for i, raw := range raws {
		f, err := newNormalizer(raw, fmt.Sprintf("%s.normalizers[%d]", field, i), depth+1, grown)
		if err != nil {
			return nil, err
		}
		if f != nil {
			all = append(all, f)
		}
	}
	return func(s string) string {
		for _, f := range all {
			s = f(s)
		}
		return s
	}, nil
}

func stripper(left, right bool) func(string) string {
	return func(s string) string {
		if left {
			s = strings.TrimLeftFunc(s, unicode.IsSpace)
		}
		if right {
			s = strings.TrimRightFunc(s, unicode.IsSpace)
		}
		return s
	}
}
