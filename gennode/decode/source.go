package decode

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"sync"

	"github.com/labstack/echo/v4"

	"meridian.internal/gpu/kvwire"
	"meridian.internal/shared/api"
)

// A leg that waits for KV may be told to fetch it elsewhere, because the context node that it began with has failed or is
// slow: the leg keeps its admission, slot and blocks.

// waiting are the legs whose KV is not here yet, by the id that they came with. The zero value is ready.
type waiting struct {
	mu   sync.Mutex // guards legs
	legs map[int64]*leg
}

func (w *waiting) enter(g *leg) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.legs == nil {
		w.legs = map[int64]*leg{}
	}
	w.legs[g.l.Request.ID] = g
}

func (w *waiting) leave(g *leg) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.legs[g.l.Request.ID] == g {
		delete(w.legs, g.l.Request.ID)
		close(g.settled)
	}
}

func (w *waiting) find(id int64) *leg {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.legs[id]
}

// source is another place to fetch the KV of a leg from.
type source struct {
	wire  *kvwire.Transfer
	id    int64
	taken chan bool // answered once: false, the KV was here already
}

// Move makes the leg id fetch its KV from the node and under the id that p names. It returns when the leg does so.
func (d *Decoder) Move(ctx context.Context, id int64, p *api.DisaggParams) error {
	g := d.waiting.find(id)
	if g == nil {
		return noLeg(id)
	}
	addr, err := d.endpoint(p)
	if err != nil {
		return err
	}
	if p.DisaggRequestID == nil {
		return api.Invalid("disagg_request_id", "want the id under which the KV is on offer")
	}
	wire, err := d.Client.Open(ctx, addr, *p.DisaggRequestID)
	if err != nil {
		return kvFault(ctx, err)
	}
	if err := wire.Request(ctx, g.held, g.left()); err != nil {
		wire.Close()
		return kvFault(ctx, err)
	}
	s := source{wire, *p.DisaggRequestID, make(chan bool, 1)}
	select {
	case g.moves <- s:
		if <-s.taken {
			return nil
		}
		err = noLeg(id)
	case <-g.settled:
		err = noLeg(id)
	case <-ctx.Done():
		err = ctx.Err()
	}
	wire.Close()
	return err
}

func noLeg(id int64) error {
	return &api.Error{Code: http.StatusNotFound, Type: api.TypeNotFound, Stage: "kv", Message: fmt.Sprintf("no leg %d waits for KV here", id)}
}

// maxMove bounds the body of a move.
const maxMove = 4 << 10

// move is PUT /kv/{disagg_request_id}: a router names another context node for a leg that waits.
func (d *Decoder) move(c echo.Context) error {
	id, err := strconv.ParseInt(c.Param("id"), 10, 64)
	if err != nil {
		return api.Invalid("id", "kv id %q: want a whole number", c.Param("id"))
	}
	p, err := api.ReadDisagg(http.MaxBytesReader(c.Response(), c.Request().Body, maxMove))
	if err != nil {
		return err
	}
	if err := d.Move(c.Request().Context(), id, p); err != nil {
		return err
	}
	return c.NoContent(http.StatusNoContent)
}
