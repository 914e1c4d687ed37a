package serve

import (
	"context"
	"encoding"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"os/exec"
	"os/signal"
	"reflect"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
)

// Exit codes of Run. An error with a method ExitCode() int chooses its own.
const (
	exitOK    = 0
	exitError = 1
	exitUsage = 2
)

// Runner is a program: a struct of options with kong tags. A program with subcommands leaves Run to each of them. Run
// returns nil when ctx ended and everything was stopped in order.
type Runner interface {
	Run(ctx context.Context, log *slog.Logger) error
}

// Option changes how Run behaves.
type Option func(*program)

// About is the text above the options in --help.
func About(text string) Option { return func(p *program) { p.about = text } }

// WithHealthcheck adds the subcommand healthcheck, which asks url unless --url says otherwise.
func WithHealthcheck(url string) Option { return func(p *program) { p.healthURL = url } }

type program struct {
	name, about, healthURL string
	args                   []string
	vars                   kong.Vars
	stdout, stderr         io.Writer
}

// common are the options of every program.
type common struct {
	Config    string `help:"YAML file with options by their names; flags and environment win over it." type:"path" placeholder:"FILE"`
	LogLevel  string `help:"Least level that is logged: debug, info, warn, error." enum:"debug,info,warn,error" default:"info"`
	LogFormat string `help:"Format of the log on stderr: text or json." enum:"text,json" default:"text"`
	Version   bool   `help:"Print the version and exit." env:"-"`
}

// exitRequest carries kong's wish to exit (after --help) up to Run, so that only main calls os.Exit.
type exitRequest int

// Run parses the command line into cli (a pointer to a struct with kong tags), runs it until it returns or SIGINT or
// SIGTERM arrives, and returns the exit code. A second signal kills at once.
func Run(name string, cli any, opts ...Option) int {
	p := &program{name: name, args: os.Args[1:], stdout: os.Stdout, stderr: os.Stderr}
	for _, o := range opts {
		o(p)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	return p.run(ctx, cli)
}

func (p *program) run(ctx context.Context, cli any) (code int) {
	defer func() {
		if r := recover(); r != nil {
			e, ok := r.(exitRequest)
			if !ok {
				panic(r)
			}
			code = int(e)
		}
	}()
	if p.healthURL != "" && len(p.args) > 0 && p.args[0] == "healthcheck" {
		return p.healthcheck().run(ctx, &healthcheck{})
	}
	var c common
	kctx, err := p.parse(cli, &c)
	if c.Version {
		fmt.Fprintln(p.stdout, p.name, Version())
		return exitOK
	}
	if err != nil {
		fmt.Fprintf(p.stderr, "%s: %v (see --help)\n", p.name, err)
		return exitUsage
	}
	return p.exitCode(p.start(ctx, kctx, c))
}

func (p *program) healthcheck() *program {
	return &program{
		name: p.name + " healthcheck", about: "Ask a health URL once; exit 0 when it answers 2xx.",
		args: p.args[1:], vars: kong.Vars{"health_url": p.healthURL}, stdout: p.stdout, stderr: p.stderr,
	}
}

func (p *program) parse(cli any, c *common) (*kong.Context, error) {
	about := p.about
	if p.healthURL != "" {
		about += "\n\nThe subcommand 'healthcheck [--url URL]' asks a running " + p.name + " for its health."
	}
	k, err := kong.New(cli, kong.Name(p.name), kong.Description(about), kong.Embed(c), p.vars, kong.DefaultEnvars("MERIDIAN"),
		kong.Writers(p.stdout, p.stderr), kong.Exit(func(code int) { panic(exitRequest(code)) }),
		kong.ValueFormatter(explain), kong.NamedMapper("pair", kong.MapperFunc(readPair)), kong.TypeMapper(reflect.TypeFor[float64](), kong.MapperFunc(readFloat)),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 120}))
	if err != nil {
		return nil, fmt.Errorf("options of %s: %w", p.name, err)
	}
	file := configFile(p.args)
	if file != "" {
		r, err := openConfig(file)
		if err != nil {
			return nil, err
		}
		if err := kong.Resolvers(r).Apply(k); err != nil {
			return nil, err
		}
	}
	return k.Parse(p.args)
}

// readPair reads an option of type "pair", two words such as in --kv-disk DIR SIZE, into a field that takes them as one text. The
// environment and a file have them as one.
func readPair(c *kong.DecodeContext, to reflect.Value) error {
	var text string
	if err := c.Scan.PopValueInto(c.Value.Name, &text); err != nil {
		return err
	}
	if !strings.ContainsAny(text, " \t") {
		var second string
		if c.Scan.Len() == 0 || c.Scan.PopValueInto(c.Value.Name, &second) != nil {
			return fmt.Errorf("want %s, got %q alone", c.Value.Tag.PlaceHolder, text)
		}
		text += " " + second
	}
	return to.Addr().Interface().(encoding.TextUnmarshaler).UnmarshalText([]byte(text))
}

// readFloat reads a number: NaN and the infinities would pass every comparison of a range, or never end.
func readFloat(c *kong.DecodeContext, to reflect.Value) error {
	var text string
	if err := c.Scan.PopValueInto("number", &text); err != nil {
		return err
	}
	v, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(v) || math.IsInf(v, 0) {
		return fmt.Errorf("want a number, got %q", text)
	}
	to.SetFloat(v)
	return nil
}

// explain is the help of an option with its default where a placeholder hides it, and its environment variable.
func explain(v *kong.Value) string {
	text := v.Help
	if v.Tag.PlaceHolder != "" && v.HasDefault && v.Default != "" && !strings.Contains(text, v.Default) {
		text = strings.TrimSuffix(text, ".") + ". Default: " + v.Default
	}
	if len(v.Tag.Envs) > 0 {
		text = strings.TrimSuffix(text, ".") + " ($" + strings.Join(v.Tag.Envs, ", $") + ")."
	}
	return text
}

func (p *program) start(ctx context.Context, kctx *kong.Context, c common) error {
	kctx.BindTo(ctx, (*context.Context)(nil))
	return kctx.Run(newLogger(p.stderr, c))
}

func (p *program) exitCode(err error) int {
	if err == nil {
		return exitOK
	}
	if text := err.Error(); text != "" {
		fmt.Fprintf(p.stderr, "%s: %s\n", p.name, text)
	}
	var coder interface{ ExitCode() int }
	var child *exec.ExitError // how a process that this one started has ended is not how this one ends
	if errors.As(err, &coder) && !errors.As(err, &child) {
		return coder.ExitCode()
	}
	return exitError
}

func newLogger(w io.Writer, c common) *slog.Logger {
	var level slog.Level
	_ = level.UnmarshalText([]byte(c.LogLevel)) // kong has checked the enum
	o := &slog.HandlerOptions{Level: level}
	if c.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// Version is the revision that the binary was built from, as far as the Go tool knows it.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	version, dirty := "devel", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision" && len(s.Value) >= 12:
			version = s.Value[:12]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "+"
		}
	}
	return version + dirty
}
