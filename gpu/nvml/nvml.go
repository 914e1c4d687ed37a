// Package nvml reads what NVIDIA's management library says of the cards that a node computes on: use, memory, power, energy,
// temperature, clocks, memory errors. It owns the choice of the card and the units; it keeps no reading and has no clock:
// shared/hardware asks.
//
// The library's binding needs cgo: builds with the tag cuda and a C compiler have it, the others say that they have not.
package nvml

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"meridian.internal/shared/rows"
)

// ErrUnavailable is returned when this build or this machine has no NVML, or NVML has no such card.
var ErrUnavailable = errors.New("nvml: not available")

// Open gives a reader of the cards that CUDA has these numbers for. visible is CUDA_VISIBLE_DEVICES, "" if it is not set. CUDA
// and NVML number alike where all cards are of one kind, or CUDA_DEVICE_ORDER is PCI_BUS_ID.
func Open(gpus []int, visible string) (read func() ([]rows.GPU, error), err error) {
	gpus = slices.Compact(slices.Sorted(slices.Values(gpus)))
	cards := make([]func() reading, len(gpus))
	for i, gpu := range gpus {
		id, err := cardOf(gpu, visible)
		if err != nil {
			return nil, err
		}
		if cards[i], err = openCard(id); err != nil {
			return nil, err
		}
	}
	return func() ([]rows.GPU, error) {
		out := make([]rows.GPU, len(gpus))
		for i, gpu := range gpus {
			out[i] = cards[i]().gpu(gpu)
		}
		return out, nil
	}, nil
}

// card names a card: by UUID, else by NVML's number.
type card struct {
	uuid  string
	index int
}

// cardOf finds the card in CUDA_VISIBLE_DEVICES, a list of numbers and of UUIDs or beginnings of them.
func cardOf(gpu int, visible string) (card, error) {
	if visible == "" {
		return card{index: gpu}, nil
	}
	list := strings.Split(visible, ",")
	if gpu >= len(list) {
		return card{}, fmt.Errorf("%w: CUDA_VISIBLE_DEVICES=%q has no card %d", ErrUnavailable, visible, gpu)
	}
	name := strings.TrimSpace(list[gpu])
	if strings.HasPrefix(name, "GPU-") || strings.HasPrefix(name, "MIG-") {
		return card{uuid: name}, nil
	}
	n, err := strconv.Atoi(name)
	if err != nil || n < 0 {
		return card{}, fmt.Errorf("%w: CUDA_VISIBLE_DEVICES=%q: %q is no card", ErrUnavailable, visible, name)
	}
	return card{index: n}, nil
}

// reading is what the library says, in its own units. A value that the card does not tell is unknown.
type reading struct {
	name                                       string
	gpuPercent, memoryPercent                  rows.Int
	memoryUsedBytes, memoryTotalBytes          rows.Int
	powerMilliwatts, energyMillijoules         rows.Int
	temperatureCelsius                         rows.Int
	smClockMHz, memoryClockMHz                 rows.Int
	clockReasons, eccCorrected, eccUncorrected rows.Int
}

// gpu gives the reading in the units of the hardware ledger.
func (r reading) gpu(index int) rows.GPU {
	scaled := func(v rows.Int, unit float64) rows.Ratio { return rows.Ratio{V: float64(v.V) * unit, OK: v.OK} }
	return rows.GPU{
		Index: index, Name: r.name,
		Utilization: scaled(r.gpuPercent, 0.01), MemoryUtilization: scaled(r.memoryPercent, 0.01),
		MemoryUsed: r.memoryUsedBytes, MemoryTotal: r.memoryTotalBytes,
		Power: scaled(r.powerMilliwatts, 1e-3), Energy: scaled(r.energyMillijoules, 1e-3), Temperature: scaled(r.temperatureCelsius, 1),
		SMClock: scaled(r.smClockMHz, 1e6), MemoryClock: scaled(r.memoryClockMHz, 1e6),
		ThrottleReasons: r.clockReasons, ECCCorrected: r.eccCorrected, ECCUncorrected: r.eccUncorrected,
	}
}
