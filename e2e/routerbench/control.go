package routerbench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"meridian.internal/shared/clock"
)

const loopback = "127.0.0.1:0"

// ServeWorkers runs a context and a generation worker, and beside them PUT /pace and GET /left/{ctx,gen}, until ctx ends. It says
// where they listen on out.
func ServeWorkers(ctx context.Context, out io.Writer) error {
	steady, err := clock.New(clock.Options{})
	if err != nil {
		return err
	}
	w := newWorker(steady)
	mux := http.NewServeMux()
	mux.HandleFunc("PUT /pace", w.setPace)
	mux.HandleFunc("GET /left/{leg}", w.getLeft)
	var at [3]net.Listener
	for i := range at {
		if at[i], err = net.Listen("tcp", loopback); err != nil {
			return err
		}
		defer at[i].Close()
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	failed := make(chan error, len(at))
	for _, l := range at[:2] {
		go func() { failed <- w.serve(ctx, l) }()
	}
	go func() { failed <- serveUntil(ctx, at[2], mux) }()
	err = json.NewEncoder(out).Encode(Listening{Ctx: at[0].Addr().String(), Gen: at[1].Addr().String(), Control: at[2].Addr().String()})
	if err != nil {
		return err
	}
	err = <-failed
	cancel()
	return errors.Join(err, <-failed, <-failed)
}

func serveUntil(ctx context.Context, l net.Listener, h http.Handler) error {
	srv := &http.Server{Handler: h}
	stop := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer stop()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// ServeHandler serves h until ctx ends, and says where on out.
func ServeHandler(ctx context.Context, out io.Writer, h http.Handler) error {
	l, err := net.Listen("tcp", loopback)
	if err != nil {
		return err
	}
	if err := json.NewEncoder(out).Encode(Listening{Addr: l.Addr().String()}); err != nil {
		return err
	}
	return serveUntil(ctx, l, h)
}

func (w *worker) setPace(rw http.ResponseWriter, r *http.Request) {
	var p Pace
	if err := json.NewDecoder(r.Body).Decode(&p); err != nil {
		http.Error(rw, err.Error(), http.StatusBadRequest)
		return
	}
	w.pace.Store(&p)
}

func (w *worker) getLeft(rw http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	left := w.gen
	if r.PathValue("leg") == "ctx" {
		left = w.ctx
	}
	w.mu.Unlock()
	_ = json.NewEncoder(rw).Encode(left) // the asker has gone if this fails
}

// setPace tells the workers how to answer from now on.
func (at Listening) setPace(ctx context.Context, p Pace) error {
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	_, err = at.control(ctx, http.MethodPut, "/pace", b)
	return err
}

func (at Listening) left(ctx context.Context, leg string) (l Left, err error) {
	b, err := at.control(ctx, http.MethodGet, "/left/"+leg, nil)
	if err != nil {
		return l, err
	}
	return l, json.Unmarshal(b, &l)
}

func (at Listening) control(ctx context.Context, method, path string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+at.Control+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s %s of the workers: status %d: %s", method, path, res.StatusCode, b)
	}
	return b, err
}
