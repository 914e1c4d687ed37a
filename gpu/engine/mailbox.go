package engine

import "sync"

// mailbox carries commands to the goroutine of loop. Posting never waits; what a client can post is bounded by the
// sequences that it holds.
type mailbox struct {
	mu     sync.Mutex // guards list and closed
	list   []func()
	closed bool
	wake   chan struct{} // capacity 1: there may be commands
}

// post runs a command on the engine's goroutine, soon; false if that has ended.
func (e *Engine) post(command func()) bool {
	m := &e.commands
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return false
	}
	m.list = append(m.list, command)
	select {
	case m.wake <- struct{}{}:
	default:
	}
	return true
}

// take empties the mailbox.
func (m *mailbox) take() []func() {
	m.mu.Lock()
	defer m.mu.Unlock()
	list := m.list
	m.list = nil
	return list
}

func (e *Engine) runCommands() {
	list := e.commands.take()
	if len(list) == 0 {
		return
	}
	for _, command := range list {
		command()
	}
	e.step.barren = false
	e.sched.Admit() // a reservation must not wait for the step in flight
}

// close lets nothing more in and returns what was left.
func (m *mailbox) close() []func() {
	m.mu.Lock()
	m.closed = true
	m.mu.Unlock()
	return m.take()
}

// ask runs f on the engine's goroutine and waits for it; false if that has ended, and f did not run.
func (e *Engine) ask(f func()) bool {
	done := make(chan struct{})
	if !e.post(func() { f(); close(done) }) {
		return false
	}
	<-done // stop runs what is left in the mailbox
	return true
}

// query is ask for what only reads: it runs f here when the engine's goroutine has ended.
func (e *Engine) query(f func()) {
	if !e.ask(f) {
		<-e.stopped
		f()
	}
}
