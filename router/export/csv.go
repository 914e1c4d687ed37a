package export

import (
	"bufio"
	"encoding/csv"
	"strconv"
	"strings"

	"meridian.internal/router/timeline"
)

// spanColumns are the columns of spans, in the order of a request; a span that occurs several times is summed.
var spanColumns = []string{
	"router_receive", "router_queue", "router_place", "retry", "gen_prepare", "gen_leg", "gen_dispatch", "gen_parse", "gen_admit", "kv_open", "gen_headers_return", "ctx_retry", "ctx_prepare", "remote", "ctx_leg", "ctx_dispatch",
	"ctx_parse", "ctx_admit", "ctx_queue", "prepare", "leg", "dispatch", "parse", "kv_fetch", "admit", "queue", "device_queue", "prefill", "prefill_wait", "prefill_sample", "prefill_sync", "ctx_emit", "ctx_return",
	"kv_handover", "gen_start", "gen_emit", "emit", "return_network", "relay", "decode", "resume", "finish",
}

var headColumns = []string{
	"request_id", "client_request_id", "outcome", "complete", "streamed", "style", "wall_ns", "ttft_ns", "e2e_ns", "unaccounted_ns", "max_bound_ns",
	"prompt_tokens", "cached_tokens", "output_tokens", "kv_bytes",
}

// table writes one row a request.
type table struct {
	b *bufio.Writer
	w *csv.Writer
}

func newCSV(b *bufio.Writer) *table {
	t := &table{b: b, w: csv.NewWriter(b)}
	row := append([]string{}, headColumns...)
	for _, s := range spanColumns {
		row = append(row, s+"_ns")
	}
	_ = t.w.Write(row) // an error stays in the writer and comes with Close
	return t
}

// Line adds a row. Absent numbers are empty cells.
func (t *table) Line(l *timeline.Line) error {
	n := func(v int64) string { return strconv.FormatInt(v, 10) }
	opt := func(v *int64) string {
		if v == nil {
			return ""
		}
		return n(*v)
	}
	prompt, cached := l.Tokens.Known()
	kv, wall := "", ""
	if l.WallNS != 0 {
		wall = n(l.WallNS)
	}
	if l.Handover != nil {
		kv = n(l.Handover.Bytes)
	}
	row := []string{
		cell(l.RequestID), cell(l.ClientRequestID), string(l.Outcome), strconv.FormatBool(l.Complete), strconv.FormatBool(l.Streamed), l.Style, wall, opt(l.TTFTNS),
		opt(l.E2ENS), opt(l.UnaccountedNS), opt(l.MaxBoundNS), opt(prompt), opt(cached), n(int64(l.Tokens.Output)), kv,
	}
	for _, name := range spanColumns {
		sum, there := int64(0), false
		for _, s := range l.Spans {
			if s.Name == name {
				sum, there = sum+s.DurNS, true
			}
		}
		if there {
			row = append(row, n(sum))
		} else {
			row = append(row, "")
		}
	}
	return t.w.Write(row)
}

// cell keeps a client's text from being taken for a formula by a spreadsheet.
func cell(s string) string {
	if s != "" && strings.IndexByte("=+-@\t\r", s[0]) >= 0 {
		return "'" + s
	}
	return s
}

// Close ends the file.
func (t *table) Close() error {
	t.w.Flush()
	if err := t.w.Error(); err != nil {
		return err
	}
	return t.b.Flush()
}
