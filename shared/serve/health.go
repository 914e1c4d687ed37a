package serve

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"
)

// healthcheck is the subcommand that container images use: they hold nothing but the binary.
type healthcheck struct {
	URL     string        `help:"Health URL to ask." default:"${health_url}" placeholder:"URL" env:"MERIDIAN_HEALTH_URL"`
	Timeout time.Duration `help:"How long an answer may take." default:"2s" env:"MERIDIAN_HEALTH_TIMEOUT"`
}

// Run asks once.
func (h *healthcheck) Run(ctx context.Context, _ *slog.Logger) error {
	ctx, cancel := context.WithTimeout(ctx, h.Timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, h.URL, nil)
	if err != nil {
		return fmt.Errorf("--url %q: %w", h.URL, err)
	}
	// The certificate of this very process names the host that others dial, not the loopback address.
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}} //nolint:gosec // nothing secret is sent
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("ask %s: %w", h.URL, err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 512))
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("%s answered %s: %s", h.URL, resp.Status, strings.TrimSpace(string(body)))
	}
	return nil
}
