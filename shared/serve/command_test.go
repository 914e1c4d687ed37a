package serve

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// tool is a program whose Run prints its options.
type tool struct {
	Listen string        `help:"Address." default:"127.0.0.1:0" placeholder:"HOST:PORT"`
	Nodes  []string      `help:"Nodes." sep:"none"`
	Batch  int           `help:"Sequences in a step." default:"8"`
	Wait   time.Duration `help:"How long." default:"3s"`
	Fast   bool          `help:"Fast." negatable:"" default:"true"`
	Fail   bool          `help:"Fail."`
	Child  bool          `help:"Fail because a process did."`
	Part   float64       `help:"Part."`
	Keep   twoWords      `help:"Two words." type:"pair" placeholder:"DIR SIZE"`
	out    *bytes.Buffer
}

// twoWords is an option that takes both as one text.
type twoWords string

func (w *twoWords) UnmarshalText(b []byte) error {
	*w = twoWords(bytes.ReplaceAll(b, []byte(" "), []byte("+")))
	return nil
}

type coded struct{ error }

func (coded) ExitCode() int { return 7 }

func (c *tool) Run(ctx context.Context, log *slog.Logger) error {
	if ctx == nil || log == nil {
		return errors.New("no context or logger")
	}
	if c.Fail {
		return coded{errors.New("broken")}
	}
	if c.Child {
		return fmt.Errorf("child: %w", exec.Command("sh", "-c", "kill -TERM $$").Run())
	}
	fmt.Fprintf(c.out, "%s %v %d %v %v %s", c.Listen, c.Nodes, c.Batch, c.Wait, c.Fast, c.Keep)
	return nil
}

func runTool(t *testing.T, args ...string) (int, string, string) {
	t.Helper()
	var out, errs bytes.Buffer
	p := &program{name: "tool", about: "A tool.", healthURL: "http://127.0.0.1:1/healthz", args: args, stdout: &out, stderr: &errs}
	code := p.run(t.Context(), &tool{out: &out})
	return code, out.String(), errs.String()
}

func TestCommandLine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(file, []byte("batch: 3\nwait: 5m\nnodes: [a, 'b,c']\nfast: false\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cases := []struct {
		name string
		env  string
		args []string
		code int
		want string // in stdout and stderr together
	}{
		{"defaults", "", nil, 0, "127.0.0.1:0 [] 8 3s true"},
		{"flags", "", []string{"--batch", "4", "--nodes=x", "--nodes=y", "--no-fast"}, 0, "127.0.0.1:0 [x y] 4 3s false"},
		{"the file over defaults", "", []string{"--config", file}, 0, "127.0.0.1:0 [a b,c] 3 5m0s false"},
		{"the environment over the file", "5", []string{"--config=" + file}, 0, "[a b,c] 5 5m0s"},
		{"flags over the environment", "5", []string{"--batch=6"}, 0, " 6 3s"},
		{"two words", "", []string{"--keep", "/a", "4GiB", "--batch=6"}, 0, " 6 3s true /a+4GiB"},
		{"two words as one", "", []string{"--keep=/a 4GiB"}, 0, "/a+4GiB"},
		{"two words of which one is missing", "", []string{"--keep", "/a"}, 2, `--keep: want DIR SIZE, got "/a" alone`},
		{"two words of which one is missing before another option", "", []string{"--keep", "/a", "--batch=6"}, 2, "--keep: want DIR SIZE"},
		{"NaN is no number", "", []string{"--part", "NaN"}, 2, `--part: want a number, got "NaN"`},
		{"an infinity is no number", "", []string{"--part=1e999"}, 2, "--part: want a number"},
		{"how a process ended is not our exit code", "", []string{"--child"}, 1, "tool: child: signal: terminated"},
		{"a bad value names the option", "", []string{"--batch", "many"}, 2, "--batch"},
		{"a bad value in the environment names the option", "many", nil, 2, "--batch"},
		{"an unknown option is refused", "", []string{"--bach", "1"}, 2, "--bach"},
		{"a file that is not there is refused", "", []string{"--config", "/nowhere.yaml"}, 2, "--config"},
		{"an error chooses its exit code", "", []string{"--fail"}, 7, "tool: broken"},
		{"help says default, variable and subcommand", "", []string{"--help"}, 0, "MERIDIAN_BATCH"},
		{"help says a default that a placeholder hides", "", []string{"--help"}, 0, "127.0.0.1:0"},
		{"version", "", []string{"--version"}, 0, "tool "},
		{"a health check of nothing fails", "", []string{"healthcheck"}, 1, "http://127.0.0.1:1/healthz"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if c.env != "" {
				t.Setenv("MERIDIAN_BATCH", c.env)
			}
			code, out, errs := runTool(t, c.args...)
			if all := out + errs; code != c.code || !strings.Contains(all, c.want) {
				t.Errorf("exit %d, output %q; want %d and %q", code, all, c.code, c.want)
			}
		})
	}
}

func TestHealthcheckTellsHealthyFromSick(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/sick" {
			http.Error(w, "no engine", http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(s.Close)
	if code, _, errs := runTool(t, "healthcheck", "--url", s.URL+"/ok"); code != 0 {
		t.Errorf("healthy: exit %d, %s", code, errs)
	}
	if code, _, errs := runTool(t, "healthcheck", "--url", s.URL+"/sick"); code != 1 || !strings.Contains(errs, "no engine") {
		t.Errorf("sick: exit %d, %q", code, errs)
	}
}

func TestConfigFileRefusesWhatItCannotMean(t *testing.T) {
	for name, text := range map[string]string{
		"a typo": "bach: 1\n", "a map": "batch: {a: 1}\n", "an empty value": "batch:\n", "a key twice in both spellings": "log-level: info\nlog_level: warn\n",
		"no YAML": "\t:", "nested lists": "nodes: [[a]]\n", "the file itself": "config: x\n",
	} {
		file := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if code, _, errs := runTool(t, "--config", file); code != 2 || !strings.Contains(errs, "--config "+file) {
			t.Errorf("%s: exit %d, %q", name, code, errs)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte("a: 1\nb: [x, y]\nc: true\n"))
	f.Add([]byte("a: {b: c}"))
	f.Add([]byte("&a [*a]"))
	f.Fuzz(func(t *testing.T, b []byte) {
		c, err := parseConfig("f", b)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "--config f: ") {
				t.Errorf("error %q does not name the file", err)
			}
			return
		}
		for k, v := range c.values {
			switch v.(type) {
			case string, bool, []any:
			default:
				t.Errorf("%s has type %T", k, v)
			}
		}
	})
}
