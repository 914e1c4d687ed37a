package pipeline

import (
	"fmt"

	"meridian.internal/gpu/backend"
)

// CopyOut implements backend.Backend.
func (p *Pipeline) CopyOut(regions []backend.Region, dst []byte) *backend.Copy {
	return p.copy(regions, dst, backend.Backend.CopyOut)
}

// CopyIn implements backend.Backend.
func (p *Pipeline) CopyIn(regions []backend.Region, src []byte) *backend.Copy {
	return p.copy(regions, src, backend.Backend.CopyIn)
}

// copy gives each stage its layers of the regions. Layers are outermost in a region, so those of a stage lie together.
func (p *Pipeline) copy(regions []backend.Region, buf []byte, begin func(backend.Backend, []backend.Region, []byte) *backend.Copy) *backend.Copy {
	if i, ok := p.stageOf(regions); ok {
		return begin(p.stages[i], regions, buf)
	}
	whole := backend.NewCopy()
	parts, err := p.split(regions, buf)
	if err != nil {
		whole.Err = err
		whole.Finish()
		return whole
	}
	copies := make([]*backend.Copy, len(parts))
	for i, part := range parts {
		copies[i] = begin(p.stages[part.stage], []backend.Region{part.region}, part.buf)
	}
	p.copies.Go(func() {
		defer whole.Finish()
		for i, c := range copies {
			<-c.Done()
			if c.Err != nil && whole.Err == nil {
				whole.Err = fmt.Errorf("pipeline: stage %d: %w", parts[i].stage, c.Err)
			}
			if i == 0 || c.StartNS < whole.StartNS {
				whole.StartNS = c.StartNS
			}
			whole.EndNS = max(whole.EndNS, c.EndNS)
		}
	})
	return whole
}

// stageOf finds the one stage that owns all regions.
func (p *Pipeline) stageOf(regions []backend.Region) (int, bool) {
	for i, s := range p.stages {
		st, all := s.Info().Stage, true
		for _, r := range regions {
			all = all && st.First <= r.LayerFrom && r.LayerTo <= st.End
		}
		if all {
			return i, true
		}
	}
	return 0, false
}

// part is what one stage has of a region.
type part struct {
	stage  int
	region backend.Region
	buf    []byte
}

func (p *Pipeline) split(regions []backend.Region, buf []byte) (parts []part, err error) {
	total := len(buf)
	for _, r := range regions {
		if r.LayerFrom < 0 || r.LayerFrom >= r.LayerTo || r.LayerTo > p.info.Layers {
			return nil, fmt.Errorf("pipeline: copy of KV layers [%d, %d), there are %d", r.LayerFrom, r.LayerTo, p.info.Layers)
		}
		layer := 2 * (r.TokenTo - r.TokenFrom) * (r.HeadTo - r.HeadFrom) * p.info.HeadSize * backend.ElementSize(p.info.KVType)
		for i, s := range p.stages {
			st, cut := s.Info().Stage, r
			cut.LayerFrom, cut.LayerTo = max(r.LayerFrom, st.First), min(r.LayerTo, st.End)
			if cut.LayerFrom >= cut.LayerTo {
				continue
			}
			n := (cut.LayerTo - cut.LayerFrom) * layer
			if n < 0 || n > len(buf) {
				return nil, fmt.Errorf("pipeline: the regions hold more than the buffer's %d bytes", total)
			}
			parts = append(parts, part{i, cut, buf[:n:n]})
			buf = buf[n:]
		}
	}
	if len(buf) > 0 {
		return nil, fmt.Errorf("pipeline: the buffer has %d bytes, %d more than the regions", total, len(buf))
	}
	return parts, nil
}
