package api

import (
	"math"
	"strconv"
)

// tinyTopP stands for a client's top_p of 0: only the most likely token. (0 means off in infer.Sampling.)
const tinyTopP = 1e-6

func (r *Request) setSampling(key, v []byte) (bool, error) {
	s := &r.Sampling
	var err error
	switch string(key) {
	case "temperature":
		err = setFloat(&s.Temperature, v, 0, 2)
	case "top_p":
		if err = setFloat(&s.TopP, v, 0, 1); err == nil && s.TopP == 0 {
			s.TopP = tinyTopP
		}
	case "min_p":
		err = setFloat(&s.MinP, v, 0, 1)
	case "top_k":
		var n int64
		n, err = decodeInt(v, -1, math.MaxInt32)
		s.TopK = int(max(n, 0))
	case "repetition_penalty":
		if err = setFloat(&s.RepetitionPenalty, v, 0, 100); err != nil || s.RepetitionPenalty == 0 {
			err = errorWant("a number above 0, to 100")
		}
	case "presence_penalty":
		err = setFloat(&s.PresencePenalty, v, -2, 2)
	case "frequency_penalty":
		err = setFloat(&s.FrequencyPenalty, v, -2, 2)
	case "seed":
		s.Seed, err = decodeSeed(v)
		r.SeedSet = err == nil
	case "logit_bias":
		s.LogitBias, err = decodeBias(v)
	case "stop":
		r.Stop, err = decodeStrings(v, maxStops)
	case "stop_token_ids":
		if r.StopTokenIDs, err = decodeIDs(v); err == nil && len(r.StopTokenIDs) > maxStopTokens {
			err = errorWant("an array of at most " + itoa(maxStopTokens) + " token ids")
		}
	case "logprobs", "top_logprobs":
		return r.setLogprobs(string(key), v)
	default:
		return false, nil
	}
	return true, err
}

func setFloat(dst *float32, v []byte, lo, hi float64) error {
	f, err := decodeFloat(v, lo, hi)
	*dst = float32(f)
	return err
}

// decodeSeed takes any integer of 64 bits, signed or not.
func decodeSeed(v []byte) (uint64, error) {
	if n, err := strconv.ParseUint(string(v), 10, 64); err == nil {
		return n, nil
	}
	n, err := strconv.ParseInt(string(v), 10, 64)
	if err != nil {
		return 0, errorWant("an integer of 64 bits")
	}
	return uint64(n), nil
}

func decodeBias(v []byte) (map[int32]float32, error) {
	want := errorWant("an object from token ids to numbers from -100 to 100, of at most " + itoa(maxLogitBias) + " entries, one a token")
	s := scanner{b: v}
	out := map[int32]float32{}
	for more := s.enter('{'); more; more = s.more('{') {
		key, value := s.key(), s.take()
		id, err := strconv.ParseInt(string(key), 10, 32)
		if err != nil || id < 0 || len(out) == maxLogitBias {
			return nil, want
		}
		if _, dup := out[int32(id)]; dup {
			return nil, want
		}
		b, err := decodeFloat(value, -100, 100)
		if err != nil {
			return nil, want
		}
		out[int32(id)] = float32(b)
	}
	if s.err != nil {
		return nil, want
	}
	return out, nil
}

// setLogprobs: completions has a number in logprobs; chat a bool there and the number in top_logprobs.
func (r *Request) setLogprobs(key string, v []byte) (bool, error) {
	if key == "logprobs" && r.Chat {
		on, err := decodeBool(v)
		r.Sampling.Logprobs = on
		return true, err
	}
	if key == "top_logprobs" && !r.Chat {
		return false, nil
	}
	if b, err := decodeBool(v); key == "logprobs" && err == nil { // TensorRT-LLM takes a bool here as well
		r.Sampling.Logprobs = b
		return true, nil
	}
	n, err := decodeInt(v, 0, maxTopLogprobs)
	if err != nil {
		return true, err
	}
	r.Sampling.TopLogprobs = int(n)
	if !r.Chat {
		r.Sampling.Logprobs = true
	}
	return true, nil
}

func (r *Request) checkLogprobs() *Error {
	if !r.Sampling.Logprobs {
		if r.Sampling.TopLogprobs > 0 {
			return Invalid("top_logprobs", "top_logprobs needs logprobs to be true")
		}
		return nil
	}
	r.Logprobs = ptr(r.Sampling.TopLogprobs)
	return nil
}
