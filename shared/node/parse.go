package node

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"

	"meridian.internal/shared/bus"
	"meridian.internal/shared/infer"
)

const maxNameLen = 128

// Key is the bucket key of a process.
func Key(role Role, name string) string { return string(role) + "." + bus.Token(name) }

// Check says what a registration lacks.
func (i Info) Check() error {
	switch i.Role {
	case RoleCtx, RoleGen, RoleRouter, RoleClocksync:
	default:
		return fmt.Errorf("%w: role %q, want ctx, gen, router or clocksync", ErrBadInfo, i.Role)
	}
	if i.Name == "" || len(i.Name) > maxNameLen {
		return fmt.Errorf("%w: name %q, want 1 to %d bytes", ErrBadInfo, i.Name, maxNameLen)
	}
	if len(i.Ranks) > infer.MaxRanks || i.Stages < 0 || i.Stages > infer.MaxStages {
		return fmt.Errorf("%w: %d ranks of %d stages of %s, want at most %d of %d", ErrBadInfo, len(i.Ranks), i.Stages, i.Name, infer.MaxRanks, infer.MaxStages)
	}
	if strings.ContainsFunc(i.Name, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return fmt.Errorf("%w: name %q, want no control characters", ErrBadInfo, i.Name)
	}
	u, err := url.Parse(i.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return fmt.Errorf("%w: url %q of %s, want http://host:port", ErrBadInfo, i.URL, i.Name)
	}
	return nil
}

// Parse reads a registry value.
func Parse(b []byte) (Info, error) {
	var i Info
	if err := json.Unmarshal(b, &i); err != nil {
		return Info{}, fmt.Errorf("%w: %w", ErrBadInfo, err)
	}
	return i, i.Check()
}

// Instance tells two processes apart that used the same name one after the other.
func (i Info) Instance() string { return i.ClockID.Instance() }
