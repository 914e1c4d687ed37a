// Package bus owns the way of records and registrations through NATS: the connection that never gives up, the server in
// process, the streams and buckets, and the publisher with its disk spool. It knows no merging and no membership rules;
// what it carries is opaque to it, but for the phase record's address.
//
// Owners of state: a Conn's maintainer goroutine makes the streams; a Publisher's sender goroutine owns the reading side
// of the spool. Serving never waits for NATS: Publish writes to the spool and returns.
package bus

import (
	"strconv"
	"strings"

	"meridian.internal/shared/phase"
)

// Names of streams, buckets and subjects.
const (
	StreamPhases    = "MERIDIAN_PHASES"
	StreamClockLog  = "MERIDIAN_CLOCK_LOG"
	BucketNodes     = "MERIDIAN_NODES"
	BucketAdoptions = "MERIDIAN_ADOPTIONS" // leases on the records of routers that are gone
	BucketBequests  = "MERIDIAN_BEQUESTS"  // lines that were written for routers that are gone, for when they are back
	BucketClocks    = "MERIDIAN_CLOCKS"

	SubjectPhases = "meridian.phase.>" // meridian.phase.<router>.<role>.<node>
	SubjectClock  = "meridian.clock.>" // meridian.clock.<node>
)

// NoRouter is the router of a direct request.
const NoRouter = "none"

// HeaderRole on a message of KV events is the role of the node: names are unique within a role.
const HeaderRole = "Meridian-Role"

// HeaderKind on a phase message says what its data is: absent for a record, KindSteps for step columns.
const (
	HeaderKind = "Meridian-Kind"
	KindSteps  = "steps"
)

// PhaseSubject is where a record of node is published for router.
func PhaseSubject(router string, role phase.Role, node string) string {
	return "meridian.phase." + Token(router) + "." + Token(string(role)) + "." + Token(node)
}

// RouterSubjects matches every record meant for router.
func RouterSubjects(router string) string { return "meridian.phase." + Token(router) + ".>" }

// IterSubject is where node publishes its rows of iteration statistics, if it does. No stream keeps them.
func IterSubject(node string) string { return "meridian.iter." + Token(node) }

// IterSubjects are those of all nodes.
const IterSubjects = "meridian.iter.*"

// No stream keeps what goes to the following subjects: what is lost is repaired by what comes later.

// KVSubject is where a node publishes its KV events.
func KVSubject(node string) string { return "meridian.kv." + Token(node) }

// LoadSubject is where a node tells its load.
func LoadSubject(node string) string { return "meridian.load." + Token(node) }

// ReserveSubject is where a router tells what it has reserved.
func ReserveSubject(router string) string { return "meridian.reserve." + Token(router) }

// Subjects of all nodes and routers.
const (
	SubjectKV      = "meridian.kv.*"
	SubjectLoad    = "meridian.load.*"
	SubjectReserve = "meridian.reserve.*"
)

// ClockSubject is where estimates of node's clock are logged.
func ClockSubject(node string) string { return "meridian.clock." + Token(node) }

// Token makes a name fit for one token of a subject and for a key of a bucket: every byte but letters, digits, '-' and '_'
// becomes '=' and two hex digits. Different names stay different.
func Token(name string) string {
	if name == "" {
		return NoRouter
	}
	plain := true
	for i := 0; i < len(name); i++ {
		plain = plain && plainByte(name[i])
	}
	if plain {
		return name
	}
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := 0; i < len(name); i++ {
		if c := name[i]; plainByte(c) {
			b.WriteByte(c)
		} else {
			b.WriteByte('=')
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&15])
		}
	}
	return b.String()
}

func plainByte(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
}

// Name undoes Token; false where a token is none of its.
func Name(token string) (string, bool) {
	if !strings.Contains(token, "=") {
		return token, token != ""
	}
	var b strings.Builder
	for i := 0; i < len(token); i++ {
		if token[i] != '=' {
			b.WriteByte(token[i])
			continue
		}
		if i+2 >= len(token) {
			return "", false
		}
		v, err := strconv.ParseUint(token[i+1:i+3], 16, 8)
		if err != nil {
			return "", false
		}
		b.WriteByte(byte(v))
		i += 2
	}
	return b.String(), true
}
