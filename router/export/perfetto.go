package export

import (
	"bufio"

	"google.golang.org/protobuf/encoding/protowire"

	"meridian.internal/router/timeline"
	"meridian.internal/shared/rows"
)

// Field numbers of Perfetto's protos (trace.proto, trace_packet.proto, track_descriptor.proto, track_event.proto).
const (
	tracePacket = 1

	packetTimestamp     = 8
	packetSequence      = 10
	packetTrackEvent    = 11
	packetSequenceFlags = 13
	packetDescriptor    = 60

	trackUUID    = 1
	trackName    = 2
	trackProcess = 3
	trackParent  = 5
	trackCounter = 8
	processPID   = 1
	processName  = 6

	eventAnnotation = 4
	eventType       = 9
	eventTrack      = 11
	eventName       = 23
	eventCounter    = 30
	eventFlows      = 47

	annotationInt  = 4
	annotationText = 6
	annotationName = 10

	sliceBegin = 1
	sliceEnd   = 2
	countEvent = 4
)

// perfetto writes Perfetto's own format: smaller than Chrome's, and with arrows that survive large files.
type perfetto struct {
	w      *bufio.Writer
	y      layout
	tracks map[uint64]bool
	pid    uint64
	buf    []byte
	begun  bool
}

func newPerfetto(w *bufio.Writer) *perfetto { return &perfetto{w: w, tracks: map[uint64]bool{}} }

func varint(b []byte, field protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), v)
}

func text(b []byte, field protowire.Number, s string) []byte {
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), s)
}

func message(b []byte, field protowire.Number, m []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), m)
}

// packet writes one TracePacket; all belong to one sequence.
func (p *perfetto) packet(body []byte) error {
	body = varint(body, packetSequence, 1)
	if !p.begun {
		p.begun = true
		body = varint(body, packetSequenceFlags, 1) // incremental state cleared
	}
	p.buf = message(p.buf[:0], tracePacket, body)
	_, err := p.w.Write(p.buf)
	return err
}

// track declares a process and a track of it, once: one of slices, or one of numbers.
func (p *perfetto) track(process, track string, numbers bool) (uint64, error) {
	parent := hash("process", process)
	if !p.tracks[parent] {
		p.tracks[parent] = true
		p.pid++
		d := varint(nil, trackUUID, parent)
		d = message(d, trackProcess, text(varint(nil, processPID, p.pid), processName, process))
		if err := p.packet(message(nil, packetDescriptor, d)); err != nil {
			return 0, err
		}
	}
	id := hash("track", process, track)
	if !p.tracks[id] {
		p.tracks[id] = true
		d := varint(nil, trackUUID, id)
		d = text(d, trackName, track)
		d = varint(d, trackParent, parent)
		if numbers {
			d = message(d, trackCounter, nil)
		}
		if err := p.packet(message(nil, packetDescriptor, d)); err != nil {
			return 0, err
		}
	}
	return id, nil
}

// Line adds a request.
func (p *perfetto) Line(l *timeline.Line) error {
	list := p.y.slices(l)
	for i := range list {
		// An arrow joins the slices that share its number: the last of one node and the first of the next.
		var flows []uint64
		if list[i].flow {
			flows = append(flows, hash(l.RequestID, list[i-1].name))
		}
		if i+1 < len(list) && list[i+1].flow {
			flows = append(flows, hash(l.RequestID, list[i].name))
		}
		if err := p.slice(&list[i], flows...); err != nil {
			return err
		}
	}
	return p.count(p.y.counters)
}

func (p *perfetto) slice(s *slice, flows ...uint64) error {
	id, err := p.track(s.process, s.track, false)
	if err != nil {
		return err
	}
	e := varint(nil, eventType, sliceBegin)
	e = varint(e, eventTrack, id)
	e = text(e, eventName, s.name)
	for _, f := range flows {
		e = flow(e, f)
	}
	if s.bound > 0 {
		e = annotate(e, arg{key: "bound_ns", num: s.bound})
	}
	for _, a := range s.args {
		e = annotate(e, a)
	}
	if err := p.packet(message(varint(nil, packetTimestamp, uint64(s.start)), packetTrackEvent, e)); err != nil {
		return err
	}
	e = varint(varint(nil, eventType, sliceEnd), eventTrack, id)
	return p.packet(message(varint(nil, packetTimestamp, uint64(s.start+s.dur)), packetTrackEvent, e))
}

// Window adds a profile window.
func (p *perfetto) Window(w *Window) error {
	list, err := p.y.window(w)
	for i := 0; err == nil && i < len(list); i++ {
		err = p.slice(&list[i])
	}
	return err
}

// Row adds what a row counts.
func (p *perfetto) Row(s *rows.Static, r *rows.Row) error { return p.count(p.y.row(s, r)) }

func (p *perfetto) count(list []counter) error {
	for _, c := range list {
		id, err := p.track(c.process, c.track, true)
		if err != nil {
			return err
		}
		e := varint(varint(varint(nil, eventType, countEvent), eventTrack, id), eventCounter, uint64(c.value))
		if err := p.packet(message(varint(nil, packetTimestamp, uint64(c.at)), packetTrackEvent, e)); err != nil {
			return err
		}
	}
	return nil
}

func flow(e []byte, id uint64) []byte {
	return protowire.AppendFixed64(protowire.AppendTag(e, eventFlows, protowire.Fixed64Type), id)
}

func annotate(e []byte, a arg) []byte {
	m := text(nil, annotationName, a.key)
	if a.text != "" {
		m = text(m, annotationText, a.text)
	} else {
		m = varint(m, annotationInt, uint64(a.num))
	}
	return message(e, eventAnnotation, m)
}

// Close ends the file.
func (p *perfetto) Close() error { return p.w.Flush() }
