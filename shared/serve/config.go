package serve

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"gopkg.in/yaml.v3"
)

const maxConfigBytes = 1 << 20

// config resolves options from a YAML file: one level, keys are the options' names ("max-num-tokens", or with '_').
// Lists set options that may be given several times.
type config struct {
	path   string
	values map[string]any
}

// configFile finds --config before kong parses, because the file is a resolver of that parse.
func configFile(args []string) string {
	for i, a := range args {
		if v, ok := strings.CutPrefix(a, "--config="); ok {
			return v
		}
		if a == "--config" && i+1 < len(args) {
			return args[i+1]
		}
		if a == "--" {
			break
		}
	}
	return os.Getenv("MERIDIAN_CONFIG")
}

func openConfig(path string) (*config, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("--config: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxConfigBytes+1))
	if err != nil {
		return nil, fmt.Errorf("--config %s: %w", path, err)
	}
	if len(b) > maxConfigBytes {
		return nil, fmt.Errorf("--config %s: larger than %d bytes", path, maxConfigBytes)
	}
	return parseConfig(path, b)
}

func parseConfig(path string, b []byte) (*config, error) {
	var raw map[string]any
	if err := yaml.Unmarshal(b, &raw); err != nil {
		return nil, fmt.Errorf("--config %s: %w", path, err)
	}
	c := &config{path: path, values: make(map[string]any, len(raw))}
	for key, v := range raw {
		name := strings.ReplaceAll(key, "_", "-")
		if _, twice := c.values[name]; twice {
			return nil, fmt.Errorf("--config %s: %s is given twice", path, name)
		}
		value, err := scalar(v)
		if err != nil {
			return nil, fmt.Errorf("--config %s: %s: %w", path, key, err)
		}
		c.values[name] = value
	}
	return c, nil
}

// scalar turns a YAML value into what kong's mappers read: a string, or a list of strings.
func scalar(v any) (any, error) {
	switch v := v.(type) {
	case nil:
		return nil, errors.New("has no value; leave the key out to get the default")
	case []any:
		list := make([]any, len(v))
		for i, e := range v {
			s, err := scalar(e)
			if err != nil {
				return nil, err
			}
			if _, nested := s.([]any); nested {
				return nil, errors.New("is a list of lists; want a value or a list of values")
			}
			list[i] = s
		}
		return list, nil
	case map[string]any, map[any]any:
		return nil, errors.New("is a map; want a value or a list of values")
	case bool:
		return v, nil
	default:
		return fmt.Sprint(v), nil
	}
}

// Validate refuses keys that are no option, since a typo would silently leave a default in force.
func (c *config) Validate(app *kong.Application) error {
	known := map[string]bool{}
	if err := kong.Visit(app, func(n kong.Visitable, next kong.Next) error {
		if f, ok := n.(*kong.Flag); ok {
			known[f.Name] = true
		}
		return next(nil)
	}); err != nil {
		return err
	}
	var unknown []string
	for name := range c.values {
		if !known[name] || name == "config" || name == "help" || name == "version" {
			unknown = append(unknown, name)
		}
	}
	if len(unknown) > 0 {
		slices.Sort(unknown)
		return fmt.Errorf("--config %s: no such option: %s", c.path, strings.Join(unknown, ", "))
	}
	return nil
}

// Resolve gives kong the file's value of a flag, unless the environment has one.
func (c *config) Resolve(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
	for _, e := range flag.Envs {
		if _, set := os.LookupEnv(e); set {
			return nil, nil
		}
	}
	return c.values[flag.Name], nil
}
