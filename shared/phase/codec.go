package phase

import (
	"errors"
	"strconv"

	"meridian.internal/shared/clock"
	"meridian.internal/shared/infer"
	"meridian.internal/shared/jsonline"
)

// Errors of Parse.
var (
	// ErrBadRecord is returned when a text is no JSON object of the record's shape.
	ErrBadRecord = errors.New("phase: bad record")
	// ErrSchema is returned when a record is of another schema than meridian.phase/1.
	ErrSchema = errors.New("phase: unknown schema")
)

// Append appends r as one JSON object without a newline. The output equals that of encoding/json.
func Append(dst []byte, r *Record) []byte {
	w := jsonline.Writer{B: dst}
	w.Open('{')
	appendIdentity(&w, r)
	w.OptStr("finish_reason", r.FinishReason)
	if e := r.Error; e != nil {
		w.OpenKey("error", '{')
		w.Str("stage", e.Stage)
		w.Str("type", e.Type)
		w.Str("message", e.Message)
		w.Bool("retryable", e.Retryable)
		w.Close('}')
	}
	appendClocks(&w, r.Clocks)
	w.PtrInt("pushed_offset_ns", r.PushedOffsetNS)
	AppendStamps(&w, &r.Stamps)
	AppendTokens(&w, r.Tokens)
	if r.KV != nil {
		AppendKV(&w, r.KV)
	}
	if r.Transfer != nil {
		AppendTransfer(&w, r.Transfer)
	}
	if r.Iters != nil {
		w.OpenKey("iters", '{')
		w.Int("first", r.Iters.First)
		w.Int("last", r.Iters.Last)
		w.Close('}')
	}
	if r.DPRank != nil {
		w.Int("dp_rank", int64(*r.DPRank))
	}
	w.Int("preemptions", int64(r.Preemptions))
	w.Int("preempted_ns", r.PreemptedNS)
	appendChunks(&w, r.Chunks)
	if r.Decision != nil {
		appendDecision(&w, r.Decision)
	}
	appendLegs(&w, r.Legs)
	AppendResumes(&w, r.Resumes)
	w.OptInt("step_messages", int64(r.StepMessages))
	if r.EnergyJ != nil {
		w.Float("energy_j", *r.EnergyJ)
	}
	w.Close('}')
	return w.B
}

func appendIdentity(w *jsonline.Writer, r *Record) {
	w.Str("schema", r.Schema)
	w.Str("role", string(r.Role))
	w.Str("node", r.Node)
	w.Str("instance", string(r.Instance))
	w.Str("router", r.Router)
	w.Str("request_id", r.RequestID)
	w.OptStr("client_request_id", r.ClientRequestID)
	if r.DisaggRequestID != 0 {
		w.Key("disagg_request_id")
		w.B = append(strconv.AppendInt(append(w.B, '"'), r.DisaggRequestID, 10), '"')
	}
	w.Int("sub", int64(r.Sub))
	w.Int("attempt", int64(r.Attempt))
	w.OptStr("traceparent", r.Traceparent)
	if r.Probe {
		w.Bool("probe", true)
	}
	w.Str("style", r.Style)
	w.Str("model", r.Model)
	w.Bool("streamed", r.Streamed)
	w.Str("outcome", string(r.Outcome))
}

func appendClocks(w *jsonline.Writer, clocks []Clock) {
	if clocks == nil {
		w.Null("clocks")
		return
	}
	w.OpenKey("clocks", '[')
	for i := range clocks {
		w.Open('{')
		w.Str("id", string(clocks[i].ID))
		w.Str("kind", clocks[i].Kind)
		if e := clocks[i].Estimate; e != nil {
			w.OpenKey("estimate", '{')
			appendEstimate(w, e)
			w.Close('}')
		}
		w.Close('}')
	}
	w.Close(']')
}

func appendEstimate(w *jsonline.Writer, e *clock.Estimate) {
	w.Str("reference", string(e.Reference))
	w.Str("local", string(e.Local))
	w.Int("offset_ns", e.OffsetNS)
	w.Int("skew_ppb", e.SkewPPB)
	w.Int("skew_err_ppb", e.SkewErrPPB)
	w.Int("eta_ppb_per_s", e.EtaPPBPerS)
	w.Int("lower_ns", e.LowerNS)
	w.Int("upper_ns", e.UpperNS)
	w.Int("at_ns", e.AtNS)
	w.Int("valid_from_ns", e.ValidFromNS)
	w.OptInt("void_after_ns", e.VoidAfterNS)
	w.Int("seq", e.Seq)
	w.Str("state", e.State)
	w.OptStr("transport", e.Transport)
	w.OptStr("via", e.Via)
	w.OptInt("rtt_ns", e.RTTNS)
	w.OptInt("samples", e.Samples)
}

// AppendStamps writes the member "stamps".
func AppendStamps(w *jsonline.Writer, s *Stamps) {
	w.OpenKey("stamps", '{')
	w.Int("clock", int64(s.Clock))
	w.OptInt("engine_clock", int64(s.EngineClock))
	for _, f := range s.All() {
		w.PtrInt(f.Name, *f.NS)
	}
	w.Close('}')
}

// AppendKV writes the member "kv".
func AppendKV(w *jsonline.Writer, k *infer.KVCounts) {
	w.OpenKey("kv", '{')
	w.Int("alloc_total_blocks", int64(k.AllocTotalBlocks))
	w.Int("alloc_new_blocks", int64(k.AllocNewBlocks))
	w.Int("reused_blocks", int64(k.ReusedBlocks))
	w.Int("partial_blocks", int64(k.PartialBlocks))
	if k.HostBlocks > 0 {
		w.Int("host_blocks", int64(k.HostBlocks))
	}
	if k.DiskBlocks > 0 {
		w.Int("disk_blocks", int64(k.DiskBlocks))
	}
	w.Int("missed_blocks", int64(k.MissedBlocks))
	w.Close('}')
}

// AppendTransfer writes the member "transfer".
func AppendTransfer(w *jsonline.Writer, t *Transfer) {
	w.OpenKey("transfer", '{')
	w.Str("peer", t.Peer)
	w.Int("bytes", t.Bytes)
	w.Int("frames", t.Frames)
	w.Int("tokens", int64(t.Tokens))
	w.Int("tokens_held", int64(t.TokensHeld))
	w.PtrInt("requested_ns", t.RequestedNS)
	w.PtrInt("start_ns", t.StartNS)
	w.PtrInt("last_byte_ns", t.LastByteNS)
	w.PtrInt("installed_ns", t.InstalledNS)
	w.Int("wire_ns", t.WireNS)
	w.Int("install_ns", t.InstallNS)
	w.Close('}')
}

func appendChunks(w *jsonline.Writer, chunks []infer.Chunk) {
	if len(chunks) == 0 {
		return
	}
	w.OpenKey("chunks", '[')
	for i := range chunks {
		c := &chunks[i]
		w.Open('{')
		w.Int("iter", c.Iter)
		w.Int("tokens", int64(c.Tokens))
		w.Int("kv_tokens", int64(c.KVTokens))
		w.Int("batch_size", int64(c.BatchSize))
		w.Int("forward_start_ns", c.ForwardStartNS)
		w.Int("forward_end_ns", c.ForwardEndNS)
		w.Int("sample_end_ns", c.SampleEndNS)
		if len(c.StageNS) > 0 {
			w.OpenKey("stage_ns", '[')
			for _, ns := range c.StageNS {
				w.ItemInt(ns)
			}
			w.Close(']')
		}
		w.Close('}')
	}
	w.Close(']')
}

func appendDecision(w *jsonline.Writer, d *Decision) {
	w.OpenKey("decision", '{')
	AppendChoice(w, d)
	if len(d.Candidates) > 0 {
		w.OpenKey("candidates", '[')
		for i := range d.Candidates {
			c := &d.Candidates[i]
			w.Open('{')
			w.Str("node", c.Node)
			w.Float("score", c.Score)
			w.Int("running", int64(c.Running))
			w.Int("waiting", int64(c.Waiting))
			w.NullInt("load_age_ns", c.LoadAgeNS)
			w.Int("queued_tokens", int64(c.QueuedTokens))
			w.Int("reserved", int64(c.Reserved))
			w.PtrInt("matched_tokens", c.MatchedTokens)
			w.Close('}')
		}
		w.Close(']')
	}
	w.Close('}')
}

// AppendChoice writes the members of a decision but for its candidates.
func AppendChoice(w *jsonline.Writer, d *Decision) {
	w.Str("policy", d.Policy)
	w.OptStr("ctx", d.Ctx)
	w.Str("gen", d.Gen)
	w.Str("reason", d.Reason)
	w.PtrInt("matched_tokens", d.MatchedTokens)
	w.PtrInt("local_ns", d.LocalNS)
	w.PtrInt("remote_ns", d.RemoteNS)
}

// AppendResumes writes the member "resumes", if there are any.
func AppendResumes(w *jsonline.Writer, list []Resume) {
	if len(list) == 0 {
		return
	}
	w.OpenKey("resumes", '[')
	for _, s := range list {
		w.Open('{')
		w.Int("sub", int64(s.Sub))
		w.Int("attempt", int64(s.Attempt))
		w.Int("tokens", int64(s.Tokens))
		w.Int("cut_ns", s.CutNS)
		w.Int("token_ns", s.TokenNS)
		w.Close('}')
	}
	w.Close(']')
}

func appendLegs(w *jsonline.Writer, legs []Leg) {
	if len(legs) == 0 {
		return
	}
	w.OpenKey("legs", '[')
	for i := range legs {
		w.Open('{')
		w.Str("role", string(legs[i].Role))
		w.Str("node", legs[i].Node)
		w.Int("sub", int64(legs[i].Sub))
		w.Int("attempt", int64(legs[i].Attempt))
		w.Bool("records", legs[i].Records)
		w.OptStr("outcome", string(legs[i].Outcome))
		w.OptInt("given", int64(legs[i].Given))
		w.PtrInt("released_ns", legs[i].ReleasedNS)
		w.Close('}')
	}
	w.Close(']')
}

// AppendTokens writes the member "tokens".
func AppendTokens(w *jsonline.Writer, t Tokens) {
	prompt, cached := t.Known()
	w.OpenKey("tokens", '{')
	w.NullInt("prompt", prompt)
	w.NullInt("cached", cached)
	w.Int("output", int64(t.Output))
	w.Close('}')
}
