package jinja

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/config"
	"github.com/nikolalohinski/gonja/v2/exec"
)

// Template is a parsed template. It does not change and may be rendered by several goroutines at a time.
type Template struct{ tpl *exec.Template }

// maxSource bounds the recursion of the parser; the longest chat templates in use have a tenth of it.
const maxSource = 256 << 10

// Parse parses a template.
func Parse(source string) (t *Template, err error) {
	defer recoverTo(&err)
	if len(source) > maxSource {
		return nil, fmt.Errorf("the template has %d bytes, more than %d", len(source), maxSource)
	}
	prepared, err := prepare(source)
	if err != nil {
		return nil, err
	}
	set, err := tags()
	if err != nil {
		return nil, err
	}
	cfg := config.New()
	cfg.KeepTrailingNewline = true // prepare has seen to white space
	tpl, err := exec.NewTemplate(rootName, cfg, loader(prepared), &exec.Environment{
		ControlStructures: set, Context: exec.EmptyContext(),
	})
	if err != nil {
		return nil, shorten(err)
	}
	if err := rewriteNodes(tpl.Root().Nodes); err != nil {
		return nil, err
	}
	return &Template{tpl}, nil
}

// shorten takes the source out of gonja's message, which quotes all of it.
func shorten(err error) error {
	for errors.Unwrap(err) != nil {
		err = errors.Unwrap(err)
	}
	return err
}

const (
	rootName  = "chat template"
	stateName = internalPrefix + "state"
)

// loader hands out the one template that there is.
type loader string

// Read implements gonja's interface.
func (l loader) Read(path string) (io.Reader, error) {
	if path != rootName {
		return nil, fmt.Errorf("no template %q: a chat template stands alone", path)
	}
	return strings.NewReader(string(l)), nil
}

// Resolve implements gonja's interface.
func (l loader) Resolve(path string) (string, error) { return path, nil }

// Inherit implements gonja's interface.
func (l loader) Inherit(string) (loaderInterface, error) { return l, nil }

// Options are what a template renders with.
type Options struct {
	Vars   Dict      // its variables
	Now    time.Time // the date that strftime_now gives; zero: the function is undefined
	Limits Limits    // zero: DefaultLimits
}

// Render renders the template. It ends with ctx's error when ctx is over.
func (t *Template) Render(ctx context.Context, o Options) (out string, err error) {
	defer recoverTo(&err)
	if err := ctx.Err(); err != nil {
		return "", err
	}
	if o.Limits == (Limits{}) {
		o.Limits = DefaultLimits()
	}
	st := &render{ctx: ctx, limits: o.Limits, filters: filters(), tests: tests()}
	vars := map[string]any{
		stateName: st, "none": None{},
		"range": st.bind("range", st.rangeFunction), "namespace": st.bind("namespace", newNamespace),
		"dict": st.bind("dict", newDict), "raise_exception": st.bind("raise_exception", raise),
	}
	if !o.Now.IsZero() {
		vars["strftime_now"] = st.bind("strftime_now", func(a args) (any, error) {
			return strftime(o.Now, text(a.at(0))), nil
		})
	}
	for _, p := range o.Vars {
		vars[text(p.Key)] = p.Value
	}
	var b strings.Builder
	err = exec.NewRenderer(st.environment(vars), &b, config.New(), loader(""), t.tpl).Execute()
	if st.err != nil {
		err = st.err
	}
	var raised *RaisedError
	switch {
	case errors.As(err, &raised):
		return "", raised
	case err != nil:
		return "", err
	}
	return b.String(), nil
}

// recoverTo turns a panic of the template library into an error.
func recoverTo(err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("the template library panicked: %v", p)
	}
}
