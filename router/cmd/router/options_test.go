package main

import (
	"os/exec"
	"strings"
	"testing"
	"time"
)

func good() *options {
	return &options{
		Name: "r", Listen: "127.0.0.1:0", Traces: "t", Grace: time.Second, Timeout: time.Minute, ClientIdle: time.Second, MaxBody: 1 << 20, Queue: 1, QueueTime: time.Second, MaxConns: 1,
		Ctx: []string{"http://a:1"}, Gen: []string{"https://b"}, Nats: "nats://a:1,nats://b:2",
	}
}

func TestValidate(t *testing.T) {
	if err := good().Validate(); err != nil {
		t.Fatal(err)
	}
	cases := map[string]func(*options){
		"--name": func(o *options) { o.Name = "a b" }, "--embedded-nats": func(o *options) { o.EmbeddedNats = true },
		"--grace": func(o *options) { o.Grace = -1 }, "--timeout": func(o *options) { o.Timeout = 0 },
		"--max-running": func(o *options) { o.MaxRunning = -1 }, "--hedge-quantile": func(o *options) { o.Hedge = 1 }, "--queue": func(o *options) { o.Queue = 0 }, "--queue-time": func(o *options) { o.QueueTime = 0 },
		"--client-idle": func(o *options) { o.ClientIdle = 0 }, "--max-body": func(o *options) { o.MaxBody = 1 },
		"--max-bodies": func(o *options) { o.MaxBodies = 1 << 20 },
		"--traces":     func(o *options) { o.Traces = "" }, "--ctx": func(o *options) { o.Ctx = []string{"a:1"} },
		"--gen": func(o *options) { o.Gen = []string{"http://"} }, "--nats": func(o *options) { o.Nats = "localhost" },
	}
	for name, spoil := range cases {
		o := good()
		spoil(o)
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestAdvertised(t *testing.T) {
	for _, c := range []struct{ advertise, listening, host, port string }{
		{"", "127.0.0.1:80", "127.0.0.1", "80"}, {"h", "0.0.0.0:80", "h", "80"}, {"h:90", "[::]:80", "h", "90"}, {"[::1]", "[::]:80", "::1", "80"},
	} {
		host, port, err := advertised(c.advertise, c.listening)
		if err != nil || host != c.host || port != c.port {
			t.Errorf("%+v: got %s %s, %v", c, host, port, err)
		}
	}
}

func TestTheRouterImportsNoEngineAndNoNode(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", ".").Output()
	if err != nil {
		t.Skip("go list does not run here: " + err.Error())
	}
	for dep := range strings.FieldsSeq(string(out)) {
		for _, no := range []string{"meridian.internal/gpu", "meridian.internal/ctxnode", "meridian.internal/gennode", "meridian.internal/e2e"} {
			if strings.HasPrefix(dep, no) {
				t.Errorf("imports %s", dep)
			}
		}
	}
}
