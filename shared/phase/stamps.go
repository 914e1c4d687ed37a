package phase

// StampCount is the number of stamps in Stamps.
const StampCount = 18

// Stamp is one stamp of a record: its name in JSON and where it is kept.
type Stamp struct {
	Name string
	NS   **int64
}

// All lists the stamps in the order of the type. A nil *NS means absent.
func (s *Stamps) All() [StampCount]Stamp {
	return [StampCount]Stamp{
		{"receive_ns", &s.ReceiveNS}, {"parsed_ns", &s.ParsedNS}, {"admitted_ns", &s.AdmittedNS}, {"first_token_ns", &s.FirstTokenNS},
		{"first_token_sent_ns", &s.FirstTokenSentNS}, {"last_token_ns", &s.LastTokenNS}, {"end_ns", &s.EndNS},
		{"started_ns", &s.StartedNS}, {"queued_ns", &s.QueuedNS}, {"first_scheduled_ns", &s.FirstScheduledNS}, {"headers_sent_ns", &s.HeadersSentNS},
		{"placed_ns", &s.PlacedNS}, {"gen_prepare_ns", &s.GenPrepareNS}, {"gen_dispatch_ns", &s.GenDispatchNS}, {"gen_headers_ns", &s.GenHeadersNS},
		{"ctx_prepare_ns", &s.CtxPrepareNS}, {"ctx_dispatch_ns", &s.CtxDispatchNS}, {"ctx_done_ns", &s.CtxDoneNS},
	}
}

// Engine are the stamps that the engine takes; see EngineClock.
func (s *Stamps) Engine() [3]**int64 {
	return [...]**int64{&s.FirstScheduledNS, &s.FirstTokenNS, &s.LastTokenNS}
}
