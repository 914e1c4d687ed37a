package rows

import "errors"

// The errors of profile windows.
var (
	// ErrProfileBusy is returned when a window is claimed, scheduled or open already.
	ErrProfileBusy = errors.New("profile: a window is open already")
	// ErrProfileInvalid is returned when what was asked for cannot be.
	ErrProfileInvalid = errors.New("profile: invalid window")
	// ErrProfileNone is returned when there is no window to stop.
	ErrProfileNone = errors.New("profile: no window is open")
)

// ProfileRequest asks for a profile of some iterations.
type ProfileRequest struct {
	OutputDir  string   `json:"output_dir"` // "": the node's own
	NumSteps   *int     `json:"num_steps"`  // null: until it is stopped
	StartStep  int      `json:"start_step"` // iterations to let pass first
	Activities []string `json:"activities"` // CPU, GPU, LAYERS; null: CPU and GPU
}

// ProfileWindow is a window that was granted.
type ProfileWindow struct {
	StartIter  int64    `json:"start_iter"`
	StopIter   *int64   `json:"stop_iter"` // the first iteration after it; null: until it is stopped
	Activities []string `json:"activities"`
	Files      []string `json:"files"` // that exist once it has ended
}
