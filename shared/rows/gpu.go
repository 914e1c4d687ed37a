package rows

// GPU is a reading of one accelerator.
type GPU struct {
	Index                   int
	Name                    string
	Utilization             Ratio // 0 to 1
	MemoryUtilization       Ratio // share of time in which the memory controller was busy
	MemoryUsed, MemoryTotal Int
	Power                   Ratio // watts
	Energy                  Ratio // joules since the driver was loaded
	Temperature             Ratio // degrees Celsius
	SMClock, MemoryClock    Ratio // hertz
	ThrottleReasons         Int   // bit mask of the driver
	ECCCorrected            Int
	ECCUncorrected          Int
}
