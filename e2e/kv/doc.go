// Package kv has tests only: whatever tier gives the KV, and whatever windows the layers have, texts of the real binaries are the
// same and every block is accounted for.
package kv
