package routerbench

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net"
	"strconv"
)

// errAnswer is returned when an answer is not the one that the mock workers give.
var errAnswer = errors.New("routerbench: wrong answer")

// player is one closed loop's connection to a subject. One goroutine uses it.
type player struct {
	net.Conn
	r    *bufio.Reader
	head head
	line []byte // start of a line whose end has not come
	seen int    // tokens of the answer
	done bool   // the end mark came
	bad  error
	// delay is called with the time at which the worker sent a token; nil: nobody asks.
	delay func(sentNS int64)
}

func dial(addr string) (*player, error) {
	c, err := net.DialTimeout("tcp", addr, readyTime)
	if err != nil {
		return nil, err
	}
	return &player{Conn: c, r: bufio.NewReaderSize(c, readBuffer)}, nil
}

// play sends a request and reads the answer to its end; tokens 0: an answer that is no stream.
func (p *player) play(request []byte, tokens int) error {
	if _, err := p.Write(request); err != nil {
		return err
	}
	if err := readHead(p.r, &p.head); err != nil {
		return unexpected(err)
	}
	if p.head.status != 200 {
		var body []byte
		err := p.head.eachPiece(p.r, func(b []byte) { body = append(body, b...) })
		return fmt.Errorf("%w: status %d: %.200s (%v)", errAnswer, p.head.status, body, err) //nolint:errorlint // it may be nil
	}
	p.seen, p.done, p.bad, p.line = 0, false, nil, p.line[:0]
	take := p.take
	if tokens == 0 {
		take = func([]byte) {}
	}
	if err := p.head.eachPiece(p.r, take); err != nil {
		return err
	}
	switch {
	case p.bad != nil:
		return p.bad
	case tokens > 0 && (p.seen != tokens || !p.done):
		return fmt.Errorf("%w: %d tokens, end mark %t; want %d and the end mark", errAnswer, p.seen, p.done, tokens)
	}
	return nil
}

// take splits a piece of the body into lines.
func (p *player) take(piece []byte) {
	for {
		i := bytes.IndexByte(piece, '\n')
		if i < 0 {
			p.line = append(p.line, piece...)
			return
		}
		line := piece[:i]
		if len(p.line) > 0 {
			line = append(p.line, line...)
			p.line = line[:0]
		}
		p.event(line)
		piece = piece[i+1:]
	}
}

var (
	dataMark = []byte("data: ")
	textMark = []byte(`"text":"w`)
	doneMark = []byte("data: [DONE]")
)

// event checks one line: the token after the last one, or the end mark.
func (p *player) event(line []byte) {
	if !bytes.HasPrefix(line, dataMark) {
		return
	}
	i := bytes.Index(line, textMark)
	if i < 0 {
		p.done = p.done || bytes.Equal(line, doneMark)
		return
	}
	text, _, _ := bytes.Cut(line[i+len(textMark):], []byte(`"`))
	number, sent, _ := bytes.Cut(text, []byte("."))
	if n, err := strconv.Atoi(string(number)); err != nil || n != p.seen {
		p.bad = fmt.Errorf("%w: token %q came where number %d was due", errAnswer, text, p.seen)
	}
	p.seen++
	if p.delay != nil {
		if ns, err := strconv.ParseInt(string(sent), 10, 64); err == nil {
			p.delay(ns)
		}
	}
}
