package phase

import (
	"meridian.internal/shared/infer"
	"meridian.internal/shared/jsonline"
)

// ParseTransfer reads the member "transfer".
func ParseTransfer(r *jsonline.Reader) *Transfer {
	if !r.Object() {
		return nil
	}
	t := new(Transfer)
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "peer":
			t.Peer = r.String()
		case "bytes":
			t.Bytes = r.Int()
		case "frames":
			t.Frames = r.Int()
		case "tokens":
			t.Tokens = int(r.Int())
		case "tokens_held":
			t.TokensHeld = int(r.Int())
		case "requested_ns":
			t.RequestedNS = r.IntPtr()
		case "start_ns":
			t.StartNS = r.IntPtr()
		case "last_byte_ns":
			t.LastByteNS = r.IntPtr()
		case "installed_ns":
			t.InstalledNS = r.IntPtr()
		case "wire_ns":
			t.WireNS = r.Int()
		case "install_ns":
			t.InstallNS = r.Int()
		default:
			r.Skip()
		}
	}
	return t
}

func parseIters(r *jsonline.Reader) *Iters {
	if !r.Object() {
		return nil
	}
	it := new(Iters)
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "first":
			it.First = r.Int()
		case "last":
			it.Last = r.Int()
		default:
			r.Skip()
		}
	}
	return it
}

func parseChunks(r *jsonline.Reader) []infer.Chunk {
	var chunks []infer.Chunk
	if !r.Array() {
		return nil
	}
	for r.Item() {
		chunks = append(chunks, parseChunk(r))
	}
	return chunks
}

func parseChunk(r *jsonline.Reader) (c infer.Chunk) {
	if !r.Object() {
		return c
	}
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		switch key {
		case "iter":
			c.Iter = r.Int()
		case "tokens":
			c.Tokens = int(r.Int())
		case "kv_tokens":
			c.KVTokens = int(r.Int())
		case "batch_size":
			c.BatchSize = int(r.Int())
		case "forward_start_ns":
			c.ForwardStartNS = r.Int()
		case "forward_end_ns":
			c.ForwardEndNS = r.Int()
		case "sample_end_ns":
			c.SampleEndNS = r.Int()
		case "stage_ns":
			if r.Array() {
				for r.Item() {
					c.StageNS = append(c.StageNS, r.Int())
				}
			}
		default:
			r.Skip()
		}
	}
	return c
}

func parseDecision(r *jsonline.Reader) *Decision {
	if !r.Object() {
		return nil
	}
	d := new(Decision)
	for key, ok := r.Key(); ok; key, ok = r.Key() {
		if key == "candidates" {
			d.Candidates = parseCandidates(r)
		} else {
			ParseChoice(r, d, key)
		}
	}
	return d
}

// ParseChoice reads a member of a decision that is not its candidates.
func ParseChoice(r *jsonline.Reader, d *Decision, key string) {
	switch key {
	case "policy":
		d.Policy = r.String()
	case "ctx":
		d.Ctx = r.String()
	case "gen":
		d.Gen = r.String()
	case "reason":
		d.Reason = r.String()
	case "matched_tokens":
		d.MatchedTokens = r.IntPtr()
	case "local_ns":
		d.LocalNS = r.IntPtr()
	case "remote_ns":
		d.RemoteNS = r.IntPtr()
	default:
		r.Skip()
	}
}

func parseCandidates(r *jsonline.Reader) (list []Candidate) {
	if !r.Array() {
		return nil
	}
	for r.Item() {
		var c Candidate
		if r.Object() {
			for key, ok := r.Key(); ok; key, ok = r.Key() {
				switch key {
				case "node":
					c.Node = r.String()
				case "score":
					c.Score = r.Float()
				case "running":
					c.Running = int(r.Int())
				case "waiting":
					c.Waiting = int(r.Int())
				case "load_age_ns":
					c.LoadAgeNS = r.IntPtr()
				case "queued_tokens":
					c.QueuedTokens = int(r.Int())
				case "reserved":
					c.Reserved = int(r.Int())
				case "matched_tokens":
					c.MatchedTokens = r.IntPtr()
				default:
					r.Skip()
				}
			}
		}
		list = append(list, c)
	}
	return list
}

func parseLegs(r *jsonline.Reader) (legs []Leg) {
	if !r.Array() {
		return nil
	}
	for r.Item() {
		var l Leg
		if r.Object() {
			for key, ok := r.Key(); ok; key, ok = r.Key() {
				switch key {
				case "role":
					l.Role = Role(r.String())
				case "node":
					l.Node = r.String()
				case "sub":
					l.Sub = int(r.Int())
				case "attempt":
					l.Attempt = int(r.Int())
				case "records":
					l.Records = r.Bool()
				case "outcome":
					l.Outcome = Outcome(r.String())
				case "given":
					l.Given = int(r.Int())
				case "released_ns":
					l.ReleasedNS = r.IntPtr()
				default:
					r.Skip()
				}
			}
		}
		legs = append(legs, l)
	}
	return legs
}

// ParseResumes reads the member "resumes".
func ParseResumes(r *jsonline.Reader) (list []Resume) {
	if !r.Array() {
		return nil
	}
	for r.Item() {
		var s Resume
		if r.Object() {
			for key, ok := r.Key(); ok; key, ok = r.Key() {
				switch key {
				case "sub":
					s.Sub = int(r.Int())
				case "attempt":
					s.Attempt = int(r.Int())
				case "tokens":
					s.Tokens = int(r.Int())
				case "cut_ns":
					s.CutNS = r.Int()
				case "token_ns":
					s.TokenNS = r.Int()
				default:
					r.Skip()
				}
			}
		}
		list = append(list, s)
	}
	return list
}
