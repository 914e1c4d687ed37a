package main

import (
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"meridian.internal/router/traces"
)

// screen is what is known of an output.
type screen struct {
	tty   bool
	width int // 0: not known
}

func terminal(f *os.File) screen {
	var s screen
	if ws, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
		s.tty, s.width = true, int(ws.Col)
	}
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && s.width == 0 {
		s.width = n
	}
	return s
}

// colors decides by --color, NO_COLOR and the terminal.
func (s screen) colors(option string) bool {
	switch option {
	case "always":
		return true
	case "never":
		return false
	}
	return s.tty && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
}

// progress shows on a terminal how much of the files is read; the function that it returns clears the line.
func progress(s *traces.Set, f *os.File) (done func()) {
	const worthIt = 64 << 20
	if s.Size < worthIt || !terminal(f).tty {
		return func() {}
	}
	var w io.Writer = f
	last := int64(-1)
	s.Progress = func(n int64) {
		if p := n * 100 / s.Size; p != last {
			last = p
			bar := strings.Repeat("█", int(p)/4) + strings.Repeat("░", 25-int(p)/4)
			fmt.Fprintf(w, "\r%s %3d %%", bar, p)
		}
	}
	return func() { fmt.Fprint(w, "\r\x1b[K") }
}
