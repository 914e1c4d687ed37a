package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"meridian.internal/router/jsonl"
	"meridian.internal/router/rowcheck"
	"meridian.internal/router/rowlog"
	"meridian.internal/router/traces"
	"meridian.internal/shared/serve"
)

type rowsCmd struct {
	Node   []string      `arg:"" help:"URLs of nodes." name:"url"`
	Output string        `short:"o" help:"Folder for a file a node." default:"traces" type:"path" placeholder:"DIR"`
	Follow bool          `help:"Go on until interrupted; the counters are written at the end."`
	Every  time.Duration `help:"How often the rows are read." default:"500ms"`

	serve.ClusterFlags `embed:"" group:"Security"`
}

// Run fetches the rows of nodes, and their counters at the end: what check compares with the timelines in the folder.
func (c *rowsCmd) Run(ctx context.Context) error {
	if c.Every <= 0 {
		return fmt.Errorf("--every %s: must be more than 0s", c.Every)
	}
	if err := os.MkdirAll(c.Output, 0o755); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	cluster, err := c.ClusterFlags.Open()
	if err != nil {
		return err
	}
	named := map[string]bool{}
	client := &http.Client{Transport: cluster.Transport(new(http.Transport), func(host string) bool { return named[host] })}
	var all []*rowFile
	for _, u := range c.Node {
		host, err := serve.HostOf(u)
		if err != nil {
			return fmt.Errorf("node %q: %w", u, err)
		}
		named[host] = true
		all = append(all, &rowFile{client: client, url: strings.TrimSuffix(u, "/"), dir: c.Output})
	}
	tick := time.NewTicker(c.Every)
	defer tick.Stop()
	for {
		failed := false
		for _, f := range all {
			f.err = f.read(context.WithoutCancel(ctx))
			failed = failed || f.err != nil
		}
		if failed || !c.Follow || ctx.Err() != nil {
			break
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	var errs []error
	for _, f := range all {
		errs = append(errs, f.finish(context.WithoutCancel(ctx)))
	}
	return errors.Join(errs...)
}

// rowFile is the file of one node.
type rowFile struct {
	client      *http.Client
	url, dir    string
	node, clock string
	cursor      int64
	rows        int64
	file        *os.File
	w           *bufio.Writer
	err         error // of the last read
}

// page is what GET /iteration_stats answers.
type page struct {
	Enabled bool              `json:"enabled"`
	Clock   string            `json:"clock_id"`
	Rows    []json.RawMessage `json:"rows"`
	Next    int64             `json:"next"`
	Newest  int64             `json:"newest"`
	Dropped int64             `json:"dropped"`
}

// fetchLimit bounds a node's answer and fetchWait the wait for it.
const (
	fetchLimit = 256 << 20
	fetchWait  = 10 * time.Second
)

func (f *rowFile) get(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchWait)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.url+path, nil)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", f.url, err)
	}
	res, err := f.client.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", f.url, err)
	}
	defer res.Body.Close()
	if res.StatusCode == http.StatusNotFound {
		return nil, fmt.Errorf("ask %s%s: there is none: is this a ctxnode or gennode?", f.url, path)
	}
	if res.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("ask %s%s: status %d", f.url, path, res.StatusCode)
	}
	b, err := io.ReadAll(io.LimitReader(res.Body, fetchLimit))
	if err != nil {
		return nil, fmt.Errorf("ask %s%s: %w", f.url, path, err)
	}
	return b, nil
}

// read appends the rows since the last read: an answer may hold a part of them.
func (f *rowFile) read(ctx context.Context) error {
	for newest := int64(-1); ; {
		p, err := f.ask(ctx)
		if err != nil {
			return err
		}
		if newest < 0 {
			newest = p.Newest // what comes meanwhile is for the next read
		}
		before := f.cursor
		if err := f.add(p); err != nil || f.cursor <= before || f.cursor >= newest {
			return err
		}
	}
}

func (f *rowFile) ask(ctx context.Context) (p page, err error) {
	b, err := f.get(ctx, "/iteration_stats?after="+strconv.FormatInt(f.cursor, 10))
	if err != nil {
		return p, err
	}
	if err := json.Unmarshal(b, &p); err != nil {
		return p, fmt.Errorf("rows of %s: %w", f.url, err)
	}
	return p, nil
}

// add writes the rows of an answer.
func (f *rowFile) add(p page) error {
	switch {
	case !p.Enabled:
		return fmt.Errorf("%s keeps no rows: its --iter-stats-interval is 0", f.url)
	case p.Newest < f.cursor:
		return fmt.Errorf("%s has begun anew: its newest row is %d, %d were read", f.url, p.Newest, f.cursor)
	case f.file != nil && p.Clock != "" && p.Clock != f.clock:
		return fmt.Errorf("%s has begun anew: its clock is %s, rows of %s were read", f.url, p.Clock, f.clock)
	case len(p.Rows) == 0:
		return nil
	}
	if f.file == nil {
		if err := f.create(p.Rows[0]); err != nil {
			return err
		}
	}
	var out []byte
	if p.Dropped > 0 {
		out = rowcheck.AppendLost(out, f.node, f.clock, p.Dropped)
	}
	for _, r := range p.Rows {
		out = append(append(out, r...), '\n')
	}
	f.cursor = p.Next
	f.rows += int64(len(p.Rows))
	if _, err := f.w.Write(out); err != nil {
		return fmt.Errorf("write rows of %s: %w", f.node, err)
	}
	return nil
}

func (f *rowFile) create(row []byte) (err error) {
	var head struct {
		Node  string `json:"node"`
		Clock string `json:"clock_id"`
	}
	if err := json.Unmarshal(row, &head); err != nil {
		return fmt.Errorf("rows of %s: %w", f.url, err)
	}
	if head.Node == "" {
		return fmt.Errorf("rows of %s name no node", f.url)
	}
	f.node, f.clock = head.Node, head.Clock
	if f.file, err = rowlog.Create(filepath.Join(f.dir, rowlog.Name(f.node, f.clock))); err != nil {
		return fmt.Errorf("rows of %s: %w", f.node, err)
	}
	f.w = bufio.NewWriter(f.file)
	return nil
}

// finish writes the counters and closes the file. A node whose rows could not be read has no counters that belong to them.
func (f *rowFile) finish(ctx context.Context) error {
	switch {
	case f.file == nil && f.err != nil:
		return f.err
	case f.file == nil:
		fmt.Fprintf(os.Stderr, "%s has run no iteration\n", f.url)
		return nil
	case f.err != nil:
		return errors.Join(f.err, f.w.Flush(), f.file.Close())
	}
	text, err := f.get(ctx, "/metrics")
	if err == nil {
		_, err = f.w.Write(rowcheck.AppendCounters(nil, f.node, f.clock, parseCounters(string(text))))
	}
	err = errors.Join(err, f.w.Flush(), f.file.Close())
	if err == nil {
		fmt.Printf("%s: %d rows\n", f.file.Name(), f.rows)
	}
	return err
}

// parseCounters reads our counters of a node's metrics; those with several series are summed.
func parseCounters(text string) map[string]float64 {
	out := map[string]float64{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "meridian_") {
			continue
		}
		name, rest, _ := strings.Cut(line, " ")
		if i := strings.LastIndexByte(line, '}'); i >= 0 {
			name, rest = line[:strings.IndexByte(line, '{')], strings.TrimSpace(line[i+1:])
		}
		if v, err := strconv.ParseFloat(rest, 64); err == nil && strings.HasSuffix(name, "_total") {
			out[name] += v
		}
	}
	return out
}

// rowFiles splits arguments into files of rows and others, and adds those that lie beside the others.
func rowFiles(args []string) (found, others []string, err error) {
	for _, a := range args {
		if strings.HasSuffix(a, rowlog.Suffix) {
			found = append(found, a)
			continue
		}
		dir := a
		info, err := os.Stat(a)
		if err == nil && !info.IsDir() {
			dir = filepath.Dir(a)
		}
		names, err := jsonl.Glob(dir, "*"+rowlog.Suffix)
		if err != nil {
			return nil, nil, fmt.Errorf("list %s: %w", dir, err)
		}
		found = append(found, names...)
		if _, none := traces.Open([]string{a}); none == nil || dir != a || len(names) == 0 {
			others = append(others, a) // else a folder of rows alone
		}
	}
	return unique(found), others, nil
}

func unique(list []string) (out []string) {
	seen := map[string]bool{}
	for _, s := range list {
		if !seen[s] {
			seen[s] = true
			out = append(out, s)
		}
	}
	return out
}

// eachRow calls f with each line of files of rows.
func eachRow(names []string, bad func(traces.Position, error), f func(b []byte, at traces.Position) error) error {
	for _, name := range names {
		err := jsonl.Read(name, func(b []byte, number int, _ int64) error {
			return f(b, traces.Position{File: name, Number: number})
		}, func(number int, err error) { bad(traces.Position{File: name, Number: number}, err) })
		if err != nil {
			return err
		}
	}
	return nil
}
