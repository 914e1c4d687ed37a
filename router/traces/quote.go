package traces

import (
	"fmt"

	"meridian.internal/shared/jsonline"
)

// maxID bounds the id that is looked for.
const maxID = 1024

// quote is an id as it stands in a file.
func quote(id string) ([]byte, error) {
	if id == "" || len(id) > maxID {
		return nil, fmt.Errorf("request id of %d bytes: want 1 to %d", len(id), maxID)
	}
	return jsonline.AppendString(nil, id), nil
}
