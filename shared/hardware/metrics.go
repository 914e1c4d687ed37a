package hardware

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"meridian.internal/shared/rows"
)

// collector exports the newest reading. A value that is unknown has no series.
type collector struct {
	s    *Sampler
	own  []metric[Sample]
	gpus []metric[rows.GPU]
}

type metric[T any] struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	at   func(*T) rows.Ratio
}

// Register exports the ledger. CPU seconds, memory and open files of the process under their usual names come from the
// Prometheus library's own collector; these are the others.
func (s *Sampler) Register(reg prometheus.Registerer) error {
	return reg.Register(&collector{s: s, own: processMetrics(), gpus: gpuMetrics()})
}

func number(v rows.Int) rows.Ratio { return rows.Ratio{V: float64(v.V), OK: v.OK} }

func processMetrics() []metric[Sample] {
	counter, gauge := prometheus.CounterValue, prometheus.GaugeValue
	one := func(name, help string, kind prometheus.ValueType, at func(*Sample) rows.Ratio) metric[Sample] {
		return metric[Sample]{prometheus.NewDesc("meridian_hardware_"+name, help, nil, nil), kind, at}
	}
	return []metric[Sample]{
		one("cpu_seconds_total", "CPU time of the process, user and system.", counter, func(s *Sample) rows.Ratio { return s.CPU }),
		one("resident_memory_bytes", "Memory of the process that is in RAM.", gauge, func(s *Sample) rows.Ratio { return number(s.RSS) }),
		one("resident_memory_peak_bytes", "The most of it so far.", gauge, func(s *Sample) rows.Ratio { return number(s.PeakRSS) }),
		one("pinned_memory_bytes", "Memory that is locked or pinned.", gauge, func(s *Sample) rows.Ratio { return number(s.Pinned) }),
		one("threads", "Threads of the process.", gauge, func(s *Sample) rows.Ratio { return number(s.Threads) }),
		one("open_files", "Open file descriptors.", gauge, func(s *Sample) rows.Ratio { return number(s.OpenFiles) }),
		one("network_receive_bytes_total", "Bytes received by the network namespace, loopback not counted.", counter, func(s *Sample) rows.Ratio { return number(s.NetRead) }),
		one("network_transmit_bytes_total", "Bytes sent by the network namespace, loopback not counted.", counter, func(s *Sample) rows.Ratio { return number(s.NetWritten) }),
		one("heap_bytes", "Go heap: live objects and those not yet collected.", gauge, func(s *Sample) rows.Ratio { return number(s.HeapBytes) }),
		one("gc_cycles_total", "Garbage collections.", counter, func(s *Sample) rows.Ratio { return number(s.GCCycles) }),
		one("gc_pause_seconds_total", "Time in which garbage collection stopped the program, by the runtime's histogram.", counter, func(s *Sample) rows.Ratio { return s.GCPause }),
	}
}

func gpuMetrics() []metric[rows.GPU] {
	counter, gauge := prometheus.CounterValue, prometheus.GaugeValue
	one := func(name, help string, kind prometheus.ValueType, at func(*rows.GPU) rows.Ratio) metric[rows.GPU] {
		return metric[rows.GPU]{prometheus.NewDesc("meridian_gpu_"+name, help, []string{"gpu"}, nil), kind, at}
	}
	return []metric[rows.GPU]{
		one("utilization_ratio", "Share of time in which a kernel ran.", gauge, func(g *rows.GPU) rows.Ratio { return g.Utilization }),
		one("memory_utilization_ratio", "Share of time in which the memory controller was busy.", gauge, func(g *rows.GPU) rows.Ratio { return g.MemoryUtilization }),
		one("memory_used_bytes", "Used memory of the device, by all processes.", gauge, func(g *rows.GPU) rows.Ratio { return number(g.MemoryUsed) }),
		one("memory_size_bytes", "Memory of the device.", gauge, func(g *rows.GPU) rows.Ratio { return number(g.MemoryTotal) }),
		one("power_watts", "Power draw.", gauge, func(g *rows.GPU) rows.Ratio { return g.Power }),
		one("energy_joules_total", "Energy since the driver was loaded.", counter, func(g *rows.GPU) rows.Ratio { return g.Energy }),
		one("temperature_celsius", "Temperature.", gauge, func(g *rows.GPU) rows.Ratio { return g.Temperature }),
		one("sm_clock_hertz", "Clock of the multiprocessors.", gauge, func(g *rows.GPU) rows.Ratio { return g.SMClock }),
		one("memory_clock_hertz", "Clock of the memory.", gauge, func(g *rows.GPU) rows.Ratio { return g.MemoryClock }),
		one("throttle_reasons", "Why clocks are low: the driver's bit mask.", gauge, func(g *rows.GPU) rows.Ratio { return number(g.ThrottleReasons) }),
		one("ecc_corrected_total", "Corrected memory errors since the driver was loaded.", counter, func(g *rows.GPU) rows.Ratio { return number(g.ECCCorrected) }),
		one("ecc_uncorrected_total", "Uncorrected memory errors since the driver was loaded.", counter, func(g *rows.GPU) rows.Ratio { return number(g.ECCUncorrected) }),
	}
}

// Describe sends the names.
func (c *collector) Describe(to chan<- *prometheus.Desc) {
	for i := range c.own {
		to <- c.own[i].desc
	}
	for i := range c.gpus {
		to <- c.gpus[i].desc
	}
}

// Collect sends the newest values.
func (c *collector) Collect(to chan<- prometheus.Metric) {
	n := c.s.Newest()
	for _, m := range c.own {
		if v := m.at(n); v.OK {
			to <- prometheus.MustNewConstMetric(m.desc, m.kind, v.V)
		}
	}
	for i := range n.GPUs {
		for _, m := range c.gpus {
			if v := m.at(&n.GPUs[i]); v.OK {
				to <- prometheus.MustNewConstMetric(m.desc, m.kind, v.V, strconv.Itoa(n.GPUs[i].Index))
			}
		}
	}
}
