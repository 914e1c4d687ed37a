package collect

import (
	"strings"
	"testing"
	"unsafe"

	"meridian.internal/shared/phase"
)

// TestWhatIsKeptHoldsNoRecord: ids and keys that are remembered for long are no parts of the text they were parsed from.
func TestWhatIsKeptHoldsNoRecord(t *testing.T) {
	c, err := New(Options{Router: "r0", Dir: t.TempDir(), Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	texts := map[string]string{} // what a record's strings are parts of, by what
	parsed := func(role phase.Role) *phase.Record {
		r, err := phase.Parse(phase.Append(nil, rec(role, "a")))
		if err != nil {
			t.Fatal(err)
		}
		texts[string(role)+" id"], texts[string(role)+" node"], texts[string(role)+" role"] = r.RequestID, r.Node, string(r.Role)
		texts[string(role)+" client's id"] = r.ClientRequestID
		return r
	}
	for _, role := range []phase.Role{phase.Ctx, phase.Disagg} {
		c.take(message{rec: parsed(role)})
	}
	c.write(c.open["a"])
	w := c.written.byID["a"]
	if w == nil || len(w.keys) != 2 || len(c.recent.index) != 2 {
		t.Fatalf("written %+v, index %v", w, c.recent.index)
	}
	kept := []string{w.id}
	for _, k := range w.keys {
		kept = append(kept, k.Node, string(k.Role))
	}
	for id := range c.recent.index {
		kept = append(kept, id)
	}
	kept = append(kept, c.recent.order...)
	for id := range c.written.byID {
		kept = append(kept, id)
	}
	for _, k := range kept {
		for what, text := range texts {
			if strings.Contains(text, k) && unsafe.StringData(text) == unsafe.StringData(k) {
				t.Errorf("%q that is kept is the %s in the record's own text", k, what)
			}
		}
	}
	if err := c.finish(); err != nil {
		t.Error(err)
	}
}

func TestALineThatWasReadStaysAsItWas(t *testing.T) {
	c, err := New(Options{Router: "r0", Dir: t.TempDir(), Recent: 1, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	write := func(id string) {
		for _, role := range []phase.Role{phase.Ctx, phase.Gen, phase.Disagg} {
			c.take(message{rec: rec(role, id)})
		}
	}
	write("a")
	found, _ := c.Find("a")
	listed := c.Recent(1)
	before := string(found)
	write("b") // takes the place of a
	if string(found) != before || string(listed[0]) != before || !strings.Contains(before, `"a"`) {
		t.Errorf("%s and %s were %s", found, listed[0], before)
	}
	if err := c.finish(); err != nil {
		t.Error(err)
	}
}

func TestTheOldestLineIsForgotten(t *testing.T) {
	g := newRing(2)
	for _, id := range []string{"a", "b", "b", "c"} { // b came twice
		g.add(&request{id: id}, true)
	}
	_, a := g.byID["a"]
	_, b := g.byID["b"]
	if _, c := g.byID["c"]; a || !b || !c || len(g.byID) != 2 {
		t.Errorf("a %v, b %v, c %v of %d", a, b, c, len(g.byID))
	}
}
