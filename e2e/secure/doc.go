// Package secure holds tests only: the real binaries with a secret and API keys, and strangers who try to get in.
package secure
