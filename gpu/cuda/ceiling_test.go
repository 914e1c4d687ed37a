//go:build cuda

package cuda

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"meridian.internal/gpu/backend"
	"meridian.internal/gpu/model"
)

// ceilings measures what the card can do: bytes a second of a large copy, read and written, and operations a second of a
// large bfloat16 product of random numbers.
func ceilings(b *testing.B) (bytesPS, flopsPS float64) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c, err := openContext(0)
	if err != nil {
		b.Skipf("no usable card: %v", err)
	}
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	s, err := c.newStream()
	must(err)
	blas, err := openBLAS(c)
	must(err)
	const copied, side = 4 << 30, 8192
	from, err := c.alloc(copied)
	must(err)
	to, err := c.alloc(copied)
	must(err)
	noise := noiseModel(b, bench1B).Embed.Data[:2*side*side]
	var stage pinned
	must(c.growPinned(&stage, len(noise)))
	copy(stage.bytes(), noise)
	matrix := from
	for i := range 2 {
		must(s.upload(matrix+address(i*len(noise)), stage.at, len(noise)))
	}
	timed := func(run func() error) float64 {
		var times []float64
		for i := range 12 {
			must(firstOf(s.record(blas.times[0]), run(), s.record(blas.times[1]), c.waitEvent(blas.times[1])))
			ms, err := c.between(blas.times[0], blas.times[1])
			must(err)
			if i > 1 {
				times = append(times, float64(ms))
			}
		}
		return median(times)
	}
	product := timed(func() error {
		return blas.multiply(s, planKey{m: side, n: side, k: side}, matrix, matrix+address(len(noise)), to)
	})
	l, err := openLibrary([]string{"libcuda.so.1"}, []string{"cuMemcpyDtoDAsync_v2"})
	must(err)
	copyMS := timed(func() error {
		return status("cuMemcpyDtoDAsync_v2", l.call("cuMemcpyDtoDAsync_v2", uintptr(to), uintptr(from), copied, s.handle))
	})
	must(firstOf(c.free(from), c.free(to), blas.close(c), c.freePinned(&stage), s.do("cuStreamDestroy_v2", s.handle), c.close()))
	return 2 * copied / copyMS * 1e3, 2 * side * side * side / product * 1e3
}

// loadRow times the loading of the weights against plain copies of as many bytes out of pinned memory; 80 % of the link is the goal.
func loadRow(b *testing.B, m *model.Model, add func(row)) {
	withStream(b, func(s *stream, p *pins) {
		var w *weights
		var loads, links []float64
		var piece pinned
		const stageBytes = 32 << 20
		err := s.growPinned(&piece, stageBytes)
		for range 5 {
			from := now()
			var loadErr error
			w, loadErr = loadWeights(newLauncher(s, nil), p, m, backend.Stage{End: m.Config.Layers}, loader{bf16: true})
			loads = append(loads, float64(now()-from)/1e6)
			from = now()
			for range w.bytes / stageBytes {
				err = firstOf(err, s.upload(w.at, piece.at, stageBytes))
			}
			err = firstOf(loadErr, err, s.wait())
			links = append(links, float64(now()-from)/1e6)
			if err := firstOf(err, s.free(w.at)); err != nil {
				b.Fatal(err)
			}
		}
		if err := s.freePinned(&piece); err != nil {
			b.Fatal(err)
		}
		first, took, link := loads[0], median(loads), median(links)
		add(row{name: "weights to the card", goal: link / 0.8, floorMS: link, ms: took, note: fmt.Sprintf("%.1f GB/s, the link %.1f; the first of five took %.1f ms",
			float64(w.bytes)/took/1e6, float64(w.bytes)/link/1e6, first)})
	})
}

// transformers times Hugging Face transformers, by the row of the table; empty if that is not asked for.
func transformers(b *testing.B) map[string]float64 {
	out := map[string]float64{}
	python := os.Getenv("MERIDIAN_TRANSFORMERS")
	if python == "" {
		return out
	}
	cmd := exec.CommandContext(b.Context(), python, "peer/baseline.py")
	cmd.Stderr = os.Stderr
	text, err := cmd.Output()
	if err != nil {
		fmt.Fprintf(os.Stderr, "transformers: %v\n", err)
	}
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		at := strings.LastIndexByte(line, ' ')
		if ms, err := strconv.ParseFloat(line[at+1:], 64); err == nil {
			out[line[:max(at, 0)]] = ms
		}
	}
	return out
}
