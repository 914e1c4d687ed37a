package backend

// Sharer is a back end whose KV other processes of the same host can read where it lies. Not every back end is one.
type Sharer interface {
	// Share describes the KV of this back end to other processes; false where the system does not allow it.
	Share() (Shared, bool)
	// Attach opens the KV of another process. An error says why it cannot be read in place.
	Attach(Shared) (Attached, error)
}

// Shared says where the KV of a process lies and how it is laid out: block, layer, K then V, token, head, head size.
type Shared struct {
	Kind           string `json:"kind"`   // way of sharing, such as "cuda-ipc"; only equal ones can be attached
	Card           string `json:"card"`   // unique name of the card that holds it
	Handle         []byte `json:"handle"` // what the system needs to open it
	KVType         string `json:"kv_type"`
	KVHeads        int    `json:"kv_heads"`
	HeadSize       int    `json:"head_size"`
	LayerFrom      int    `json:"layer_from"`
	LayerTo        int    `json:"layer_to"`
	TokensPerBlock int    `json:"tokens_per_block"`
	KVBlocks       int    `json:"kv_blocks"`
}

// Attached is the KV of another process. It is closed when that process is gone or not needed.
type Attached interface {
	// Pull queues a copy out of it into the back end that attached it. A step submitted after Copy.Done sees it. The
	// caller makes sure that the source is written and stays until then.
	Pull(Pull) *Copy
	// Close ends the sharing, after the copies that are queued.
	Close() error
}

// Pull is a part of one sequence that is copied. From and To are the blocks, there and here, that hold tokens
// [TokenFrom, TokenTo), in their order; both may have another number of tokens.
type Pull struct {
	LayerFrom, LayerTo int
	TokenFrom, TokenTo int // positions in the sequence
	From, To           []int32
}
