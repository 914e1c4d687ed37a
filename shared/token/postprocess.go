package token

import (
	"encoding/json"
	"fmt"
	"slices"
	"unicode/utf8"
)

// postProcessorJSON holds the fields of all kinds of post-processor.
type postProcessorJSON struct {
	Type       string            `json:"type"`
	Processors []json.RawMessage `json:"processors"`
	Single     []templateItem    `json:"single"`
	Special    map[string]struct {
		IDs []int32 `json:"ids"`
	} `json:"special_tokens"`
}

type templateItem struct {
	SpecialToken *struct {
		ID string `json:"id"`
	} `json:"SpecialToken"`
	Sequence *struct {
		ID string `json:"id"`
	} `json:"Sequence"`
}

// addPostProcessor compiles "post_processor" into the ids before and after a text.
func (t *Tokenizer) addPostProcessor(raw json.RawMessage, field string, depth int) error {
	if isNull(raw) {
		return nil
	}
	if depth > maxNesting {
		return fmt.Errorf("%s: nested more than %d deep", field, maxNesting)
	}
	var j postProcessorJSON
	if err := json.Unmarshal(raw, &j); err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	switch j.Type {
	case "ByteLevel": // concerns offsets only
		return nil
	case "TemplateProcessing":
		return t.addTemplate(j, field)
	case "Sequence":
		for i, sub := range j.Processors {
			if err := t.addPostProcessor(sub, fmt.Sprintf("%s.processors[%d]", field, i), depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	return unsupported(field+".type", j.Type, "Sequence, ByteLevel or TemplateProcessing")
}

func (t *Tokenizer) addTemplate(j postProcessorJSON, field string) error {
	var before, after []int32
	texts := 0
	for i, item := range j.Single {
		switch {
		case item.Sequence != nil && item.Sequence.ID == "A":
			texts++
		case item.SpecialToken != nil:
			name := item.SpecialToken.ID
			tok, ok := j.Special[name]
			if !ok {
				return fmt.Errorf("%s.single[%d]: %q is not in special_tokens", field, i, name)
			}
			for _, id := range tok.IDs {
				if !t.entry(id).known {
					return fmt.Errorf("%s.special_tokens: id %d of %q is not in the vocabulary", field, id, name)
				}
			}
			if texts == 0 {
				before = append(before, tok.IDs...)
			} else {
				after = append(after, tok.IDs...)
			}
		default:
			return fmt.Errorf("%s.single[%d] is neither a SpecialToken nor Sequence A", field, i)
		}
	}
	if texts != 1 {
		return fmt.Errorf("%s.single holds Sequence A %d times; want once", field, texts)
	}
	// A later processor wraps what an earlier one made.
	t.prefix = slices.Concat(before, t.prefix)
	t.suffix = slices.Concat(t.suffix, after)
	return nil
}

// decoderJSON holds the fields of all kinds of decoder.
type decoderJSON struct {
	Type           string            `json:"type"`
	Decoders       []json.RawMessage `json:"decoders"`
	Pattern        patternJSON       `json:"pattern"`
	Content        string            `json:"content"`
	Start          int               `json:"start"`
	Stop           int               `json:"stop"`
	Replacement    string            `json:"replacement"`
	PrependScheme  string            `json:"prepend_scheme"`
	AddPrefixSpace *bool             `json:"add_prefix_space"`
}

// add compiles "decoder". A Sequence is accepted in the order that can be applied token by token: Replace, ByteFallback,
// Fuse, Strip, each optional.
func (d *decoder) add(raw json.RawMessage, field string) error {
	var j decoderJSON
	if isNull(raw) {
		return unsupported(field, nil, "ByteLevel, Metaspace or Sequence")
	}
	if err := json.Unmarshal(raw, &j); err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	switch j.Type {
	case "ByteLevel":
		d.byteLevel = true
		return nil
	case "Metaspace":
		return d.addMetaspace(j, field)
	case "Sequence":
		fused := false
		for i, sub := range j.Decoders {
			if err := d.addStep(sub, fmt.Sprintf("%s.decoders[%d]", field, i), &fused); err != nil {
				return err
			}
		}
		return nil
	}
	return unsupported(field+".type", j.Type, "ByteLevel, Metaspace or Sequence")
}

func (d *decoder) addMetaspace(j decoderJSON, field string) error {
	if utf8.RuneCountInString(j.Replacement) != 1 {
		return unsupported(field+".replacement", j.Replacement, "one character")
	}
	d.replace = append(d.replace, [2]string{j.Replacement, " "})
	if prependScheme(j.PrependScheme, j.AddPrefixSpace) != "never" {
		d.marker = j.Replacement
	}
	return nil
}

// addStep compiles one member of a Sequence. fused says that Fuse came before.
func (d *decoder) addStep(raw json.RawMessage, field string, fused *bool) error {
	var j decoderJSON
	if err := json.Unmarshal(raw, &j); err != nil {
		return fmt.Errorf("%s: %w", field, err)
	}
	switch {
	case j.Type == "Replace" && !d.fallback && !*fused && j.Pattern.String != nil && *j.Pattern.String != "":
		d.replace = append(d.replace, [2]string{*j.Pattern.String, j.Content})
		return d.grown.by(*j.Pattern.String, j.Content, field)
	case j.Type == "ByteFallback" && !*fused:
		d.fallback = true
	case j.Type == "Fuse":
		*fused = true
	case j.Type == "Strip" && *fused && d.strip == "" && j.Start >= 0 && j.Stop == 0 && utf8.RuneCountInString(j.Content) == 1:
		d.strip, d.stripMax = j.Content, j.Start
	case j.Type == "ByteLevel" && len(d.replace) == 0 && !d.fallback && !*fused:
		d.byteLevel = true
	default:
		return unsupported(field, string(raw), "Replace of a String, ByteFallback, Fuse, Strip at the start, in this order")
	}
	return nil
}
