//go:build cuda && cgo

package nvml

import (
	"fmt"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"meridian.internal/shared/rows"
)

// openCard opens the library, which stays open: a driver unloads it with the process.
func openCard(c card) (func() reading, error) {
	lib := nvml.New()
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return nil, fmt.Errorf("%w: libnvidia-ml.so.1 of the driver: %w", ErrUnavailable, ret)
	}
	var d nvml.Device
	var ret nvml.Return
	if c.uuid != "" {
		d, ret = lib.DeviceGetHandleByUUID(c.uuid)
	} else {
		d, ret = lib.DeviceGetHandleByIndex(c.index)
	}
	if ret != nvml.SUCCESS {
		return nil, fmt.Errorf("%w: card %+v: %w", ErrUnavailable, c, ret)
	}
	return func() reading { return readCard(d) }, nil
}

func readCard(d nvml.Device) (r reading) {
	r.name, _ = d.GetName()
	if use, ret := d.GetUtilizationRates(); ret == nvml.SUCCESS {
		r.gpuPercent, r.memoryPercent = rows.Some(int64(use.Gpu)), rows.Some(int64(use.Memory))
	}
	if m, ret := d.GetMemoryInfo(); ret == nvml.SUCCESS {
		r.memoryUsedBytes, r.memoryTotalBytes = rows.Some(int64(m.Used)), rows.Some(int64(m.Total))
	}
	r.powerMilliwatts = known(d.GetPowerUsage())
	r.energyMillijoules = known(d.GetTotalEnergyConsumption())
	r.temperatureCelsius = known(d.GetTemperature(nvml.TEMPERATURE_GPU))
	r.smClockMHz = known(d.GetClockInfo(nvml.CLOCK_SM))
	r.memoryClockMHz = known(d.GetClockInfo(nvml.CLOCK_MEM))
	r.clockReasons = known(d.GetCurrentClocksThrottleReasons())
	r.eccCorrected = known(d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC))
	r.eccUncorrected = known(d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC))
	return r
}

func known[T uint32 | uint64](v T, ret nvml.Return) rows.Int {
	if ret != nvml.SUCCESS {
		return rows.Int{}
	}
	return rows.Some(int64(v))
}
